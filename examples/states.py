"""A prefix cache and a speculative decoder on tidegate.StatePool, with a small model of random weights.

Both give the bits of the plain way: the cache of processing everything again, the decoder of one token at a time.
"""

import torch

import tidegate

HIDDEN, LAYERS, HK, HV, K, V, W = 64, 3, 2, 4, 32, 32, 4
SIZES = {"HK": HK, "HV": HV, "K": K, "V": V}
D = 2 * HK * K + HV * V


class Model:
    """Linear-attention layers between an embedding and a head; `seen` counts the tokens that went through."""

    def __init__(self, vocabulary=50):
        weight = lambda *shape: torch.randn(*shape) * shape[0] ** -0.5  # noqa: E731
        self.embedding = torch.randn(vocabulary, HIDDEN)
        self.projections = [weight(HIDDEN, D + HV * V + 2 * HV) for _ in range(LAYERS)]
        self.outputs = [weight(HV * V, HIDDEN) for _ in range(LAYERS)]
        self.parameters = [(weight(D, W), None, torch.rand(HV), torch.randn(HV)) for _ in range(LAYERS)]
        self.norm = torch.ones(V)
        self.seen = 0

    def __call__(self, tokens, pool, sequence, verify=False):
        """Logits of every token. The sequence's states move on; with verify it may be rolled back with accept()."""
        self.seen += len(tokens)
        x = self.embedding[torch.tensor(tokens)]
        for i in range(LAYERS):
            # Row by row: a matrix product of torch's has other bits for one row than for many.
            projected = torch.stack([row @ self.projections[i] for row in x])
            parts = projected.split([D, HV * V, HV, HV], 1)
            y = (self.step if verify or len(tokens) == 1 else self.prompt)(i, parts, pool, sequence, len(tokens))
            x = x + torch.stack([row @ self.outputs[i] for row in y])
        if not verify:
            sequence.advance(len(tokens))
        return torch.stack([row @ self.embedding.T for row in x])

    def step(self, i, parts, pool, sequence, count):
        conv, state = pool.layer(i)
        where = {**pool.indices([sequence]), "conv_indices": pool.rows([sequence])}
        weight, bias, A_log, dt_bias = self.parameters[i]
        cu = torch.tensor([0, count])
        return tidegate.gdn_packed_decode(
            *parts, conv, weight, bias, A_log, dt_bias, state, self.norm, cu_seqlens=cu, **where, **SIZES
        )

    def prompt(self, i, parts, pool, sequence, count):
        mixed, z, a, b = parts
        conv, state = pool.layer(i)
        weight, bias, A_log, dt_bias = self.parameters[i]
        cu = torch.tensor([0, count])
        pool.settle(sequence)
        x = tidegate.ops.causal_conv1d_update(
            mixed,
            conv,
            weight,
            bias,
            cu_seqlens=cu,
            cache_indices=pool.rows([sequence]),
            state_anchor="head",
            activation="silu",
        )
        q, k, v = (t.view(count, -1, n) for t, n in zip(x.split([HK * K, HK * K, HV * V], 1), (K, K, V), strict=True))
        g, beta = tidegate.ops.gdn_gating_fwd(a, b, A_log, dt_bias, layout="TND")
        where = pool.indices([sequence], per_token=False)
        o = tidegate.recurrent_gated_delta_rule(q, k, v, g, beta, state, cu_seqlens=cu, use_qk_l2norm=True, **where)
        return tidegate.ops.rms_norm_gated_fwd(o, z.view(count, HV, V), self.norm)[0].flatten(1)


def prefix_cache(model):
    """An edited last turn: only the turn is processed again."""
    chat = torch.randint(
        50, (3 * tidegate.chunk_size(),)
    ).tolist()  # on the chunk grid, so that cutting here keeps bits
    turn, edited = torch.randint(50, (2, 20)).tolist()
    pool = tidegate.StatePool(LAYERS, 2, **SIZES, dtype=torch.float32)
    talk = pool.open()
    model(chat, pool, talk)
    cached = pool.snapshot(talk)
    model(turn, pool, talk)
    before = model.seen
    pool.restore(cached, talk)
    got = model(edited, pool, talk)
    processed = model.seen - before
    want = model(chat + edited, pool, pool.open())[len(chat) :]
    return processed, len(chat) + len(edited), torch.equal(got, want)


def speculative(model, drafts=4, length=40):
    """Greedy decoding with drafts of which every number, 0 .. drafts, turns out right in turn."""
    prompt = torch.randint(50, (24,)).tolist()
    pool = tidegate.StatePool(LAYERS, 2, **SIZES, drafts=drafts, dtype=torch.float32)
    plain, tokens = pool.open(), []
    token = int(model(prompt, pool, plain)[-1].argmax())
    while len(tokens) < length + drafts + 1:  # the oracle of the drafts below
        tokens.append(token)
        token = int(model([token], pool, plain)[-1].argmax())
    fast, out, calls = pool.open(), [], 0
    token = int(model(prompt, pool, fast)[-1].argmax())
    while len(out) < length:
        right = calls % (drafts + 1)  # so many drafts are right, then one is wrong
        draft = tokens[len(out) + 1 : len(out) + 1 + right] + [(tokens[len(out) + 1 + right] + 1) % 50] * (
            drafts - right
        )
        answers = model([token, *draft], pool, fast, verify=True).argmax(1).tolist()
        accepted = 1
        while accepted <= drafts and draft[accepted - 1] == answers[accepted - 1]:
            accepted += 1
        assert accepted == right + 1
        fast.accept(accepted)
        out += [token, *draft[: accepted - 1]]
        token, calls = answers[accepted - 1], calls + 1
    return len(out), calls, out == tokens[: len(out)]


def main():
    torch.manual_seed(0)
    with torch.no_grad():
        model = Model()
        processed, total, same = prefix_cache(model)
        print(f"edited last turn: {processed} of {total} tokens processed, same bits as all of them: {same}")
        assert same and processed == 20
        count, calls, same = speculative(model)
        print(f"speculative decoding: {count} tokens in {calls} calls, same tokens as one by one: {same}")
        assert same


if __name__ == "__main__":
    main()
