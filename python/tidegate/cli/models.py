"""From what a user names, a folder or a family, to a model."""

import json
import sys
from pathlib import Path

from tidegate.cli import memory
from tidegate.cli.command import Failure, require, threads

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_arguments(parser, families=False):
    """The arguments that say which model, in which type."""
    what = "a folder with a model of Transformers" + (", or a family for a tiny random one" if families else "")
    parser.add_argument("model", metavar="MODEL_DIR" + ("|FAMILY" if families else ""), help=what)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="of the weights (default auto: as they are stored)"
    )
    parser.add_argument("--threads", type=threads, help="threads (default: torch's)")
    parser.add_argument("--ignore-memory", action="store_true", help="start although the estimate says it will not fit")


def families():
    """The families that a tiny model can be made of, and that are patched without being discovered."""
    from tidegate.patch.gdn_families import FAMILIES

    return FAMILIES


def folder_of(name: str) -> Path:
    """The folder of a model; fails if it is not one."""
    folder = Path(name).expanduser()
    if not folder.exists():
        known = ", ".join(families())
        raise Failure(
            f"{name}: no such folder",
            f"download one (hf download OWNER/MODEL --local-dir {folder.name}), or name a family: {known}",
        )
    if not (folder / "config.json").is_file():
        raise Failure(
            f"{name}: the folder has no config.json", "name the folder that holds config.json and the weights"
        )
    return folder


def read_config(folder: Path):
    """The configuration of a folder; fails if Transformers does not know its kind, or there is nothing to patch."""
    require("transformers", "a model")
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError, json.JSONDecodeError) as error:
        first = str(error).strip().split("\n")[0]
        raise Failure(
            f"{folder}/config.json: Transformers {transformers.__version__} cannot read it: {first[:200]}",
            "update Transformers (pip install -U transformers) or check the file",
        ) from None
    text = config.get_text_config()
    if "linear_attention" not in (getattr(text, "layer_types", None) or ()):
        raise Failure(
            f"{folder} is a {config.model_type} model: it has no linear-attention layers",
            f"Tidegate is for gated-delta models: {', '.join(families())} and relatives",
        )
    return config


def dtype_name(config, dtype: str) -> str:
    """The type that weights will have in memory."""
    if dtype != "auto":
        return dtype
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return str(stored).removeprefix("torch.") if stored is not None else "float32"


def needed(folder: Path, config, dtype: str, trainable_share: float = 0.0) -> float | None:
    """Bytes that a folder's model will take; None if its files do not tell."""
    count = memory.count_parameters(folder)
    if count is None:
        return None
    return memory.estimate(count, dtype_name(config, dtype), int(count * trainable_share))


def load(name: str, dtype: str, ignore_memory: bool, trainable_share: float = 0.0, step_tokens: int = 0):
    """The model of a folder, its estimate printed and checked first. step_tokens: most tokens of a training step."""
    folder = folder_of(name)
    config = read_config(folder)
    bytes_needed = needed(folder, config, dtype, trainable_share)
    if bytes_needed is None:
        raise Failure(f"{folder} holds no *.safetensors files", "save the model with model.save_pretrained(folder)")
    bytes_needed += memory.logits(step_tokens, config.get_text_config().vocab_size)
    what = "weights, gradients and optimizer" if trainable_share else "weights"
    what += " and logits" if step_tokens else ""
    if step_tokens and config.get_text_config() is not config:
        print(f"{folder}: a {config.model_type} model: its text part alone is trained and saved", file=sys.stderr)
    facts = f"{folder}: {config.model_type}, {dtype_name(config, dtype)}, about {memory.gib(bytes_needed)} for {what}"
    print(facts, file=sys.stderr)  # standard output is for the result
    if not ignore_memory:
        fewer = ", --lora, fewer --batch-tokens" if step_tokens else ""
        memory.ensure(bytes_needed, str(folder), f"use --dtype bfloat16{fewer} or a smaller model")
    import transformers

    quiet()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval()


def quiet():
    """No advice of Transformers to install GPU kernels, and no bars for loading."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def empty(name: str):
    """The model of a folder without memory for its weights."""
    import torch
    import transformers

    config = read_config(folder_of(name))
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def tiny(family: str, dtype: str):
    """A tiny random model of a family."""
    require("transformers", "a model")
    import torch

    from tidegate.check.tiny import UnknownFamily, build

    quiet()
    try:
        return build(family, dtype=torch.float32 if dtype == "auto" else getattr(torch, dtype))
    except UnknownFamily as error:
        raise Failure(str(error), "update Transformers (pip install -U transformers)") from None


class Tokens:
    """Text to tokens and back: the folder's tokenizer, or bytes."""

    def __init__(self, name: str, as_bytes: bool):
        self.tokenizer = None
        if as_bytes:
            return
        folder = folder_of(name)
        if not any(folder.glob("tokenizer*")):
            raise Failure(
                f"{folder} has no tokenizer",
                "copy the tokenizer's files into the folder; a model of bytes (as the demo's) wants --bytes",
            )
        import transformers

        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)

    @property
    def end(self):
        """The token that ends a text, or None."""
        return None if self.tokenizer is None else self.tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        return list(text.encode()) if self.tokenizer is None else self.tokenizer(text)["input_ids"]

    def encode_chat(self, messages) -> list[int]:
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise Failure("messages need a tokenizer with a chat template", 'use lines with "text" instead')
        return self.tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]

    def decode(self, ids) -> str:
        if self.tokenizer is None:
            return bytes(int(i) & 255 for i in ids).decode(errors="replace")
        return self.tokenizer.decode(ids, skip_special_tokens=True)
