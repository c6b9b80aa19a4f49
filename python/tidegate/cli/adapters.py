"""LoRA adapters: a new one to train, and a folder that PEFT wrote to generate with."""

import json
from pathlib import Path

from tidegate.cli import memory, models
from tidegate.cli.command import Failure, require

CONFIG = "adapter_config.json"
# The projections of the known families; those that a model has are adapted.
ADAPTED = "in_proj_qkv in_proj_z in_proj_qkvz out_proj q_proj k_proj v_proj g_proj o_proj".split()
WIDTH = 4  # bytes of a number: PEFT keeps adapters in fp32


def adapt(model, rank: int):
    """The model with a new LoRA adapter on its projections."""
    require("peft", "--lora")
    import peft

    here = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[n for n in ADAPTED if n in here])
    return peft.get_peft_model(model, config)


def count(folder: Path, rank: int) -> int:
    """Parameters of a new adapter on a folder's model."""
    found = memory.shapes(folder) or {}
    adapted = [shape for name, shape in found.items() if name.endswith(".weight") and name.split(".")[-2] in ADAPTED]
    return sum(rank * sum(shape) for shape in adapted)


def split(name: str):
    """(name of a model's folder, None), or for a folder with an adapter (that of its base model, the adapter's)."""
    folder = Path(name).expanduser()
    if not (folder / CONFIG).is_file():
        return name, None
    require("peft", f"{name}: an adapter")
    try:
        base = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, LookupError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise Failure(f"{folder / CONFIG} names no base_model_name_or_path", "write the folder of the base model there")
    if not Path(base).expanduser().is_dir():
        raise Failure(
            f"{name} is an adapter of {base}, and there is no such folder",
            f"put the base model there, or write its folder into {folder / CONFIG} as base_model_name_or_path",
        )
    if memory.shapes(folder) is None:
        raise Failure(f"{folder} holds no *.safetensors files", "save the adapter again with model.save_pretrained")
    return base, folder


def attach(model, folder: Path):
    """The model with the adapter of a folder."""
    import peft

    try:
        return peft.PeftModel.from_pretrained(model, folder).eval()
    except Exception as error:  # noqa: BLE001  (PEFT raises what it likes for an adapter of another model)
        raise Failure(
            f"{folder}: the adapter does not fit its base model: {models.first_line(error)}",
            f"check base_model_name_or_path in {folder / CONFIG}",
        ) from None
