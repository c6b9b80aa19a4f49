"""A small random Qwen3.5 trained with the rule of this library follows the loss curve of the stock model. Needs
Transformers."""

import pytest
import torch

import tidegate

qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
STEPS = 50


def make_model():
    from transformers import Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,  # three of them linear attention, one full attention
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        attn_implementation="eager",
    )
    return qwen.Qwen3_5ForCausalLM(config).float().train()


def train(model):
    """Losses of AdamW on sequences that a model can learn: every token follows from the one before it."""
    random = torch.Generator().manual_seed(1)
    follower = torch.randperm(256, generator=random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        tokens = [torch.randint(256, (2,), generator=random)]
        for _ in range(95):
            tokens.append(follower[tokens[-1]])
        ids = torch.stack(tokens, dim=1)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def test_loss_curve(monkeypatch):
    torch.set_num_threads(2)
    stock_rule = qwen.torch_chunk_gated_delta_rule
    plain = getattr(stock_rule, "__wrapped__", stock_rule)  # not the GPU code that stands in for it with FLA
    calls = []

    def ours(*args, **kwargs):
        calls.append(1)
        kwargs.pop("use_cache", None)  # the model hands on what it was called with
        return tidegate.chunk_gated_delta_rule(*args, **kwargs)

    monkeypatch.setattr(qwen, "torch_chunk_gated_delta_rule", plain)
    stock = train(make_model())
    monkeypatch.setattr(qwen, "torch_chunk_gated_delta_rule", ours)
    found = train(make_model())
    assert len(calls) == 3 * STEPS
    assert stock[-1] < 0.8 * stock[0]  # it learns
    difference = ((found - stock).abs() / stock).max().item()
    print(f"loss {stock[0]:.4f} -> {stock[-1]:.4f}, largest relative difference {difference:.2e}")
    assert difference <= 1e-4
