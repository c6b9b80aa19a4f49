"""From what a user names, a folder or a family, to a model."""

import importlib.util
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


def known():
    """The families that the installed Transformers has, for messages."""
    return ", ".join(f for f in families() if importlib.util.find_spec(f"transformers.models.{f}"))


def folder_of(name: str, or_family=False) -> Path:
    """The folder of a model; fails if it is not one. or_family: the command takes a family too."""
    require("transformers", "a model")
    folder = Path(name).expanduser()
    if not folder.exists():
        other = f", or name a family: {known()}" if or_family else ""
        if not or_family and name in families():
            other = " (names of families are for report and check)"
        raise Failure(
            f"{name}: no such folder", f"download one (hf download OWNER/MODEL --local-dir {folder.name}){other}"
        )
    if not folder.is_dir():
        raise Failure(
            f"{name}: expected a folder, got a file", "name the folder that holds config.json and the weights"
        )
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        what = "an adapter, which only generate takes:" if adapter else "the folder has"
        raise Failure(f"{name}: {what} no config.json", "name the folder that holds config.json and the weights")
    return folder


def first_line(error: Exception) -> str:
    """What an exception says, short enough for a message."""
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:200]


def read_config(folder: Path):
    """The configuration of a folder; fails if Transformers does not know its kind, or there is nothing to patch."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise Failure(
            f"{folder}/config.json: Transformers {transformers.__version__} cannot read it: {first_line(error)}",
            "update Transformers (pip install -U transformers) or check the file",
        ) from None
    text = config.get_text_config()
    if "linear_attention" not in (getattr(text, "layer_types", None) or ()):
        raise Failure(
            f"{folder} is a {config.model_type} model: it has no linear-attention layers",
            f"Tidegate is for gated-delta models: {known()} and relatives",
        )
    return config


def dtype_name(config, dtype: str) -> str:
    """The type that weights will have in memory."""
    if dtype != "auto":
        return dtype
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return str(stored).removeprefix("torch.") if stored is not None else "float32"


def load(
    name: str,
    dtype: str,
    ignore_memory: bool,
    *,
    train_all=False,
    step_tokens: int = 0,
    adapter_bytes: float = 0.0,
    or_family=False,
):
    """The model of a folder, its estimate printed and checked first. step_tokens: most tokens of a training step."""
    folder = folder_of(name, or_family)
    config = read_config(folder)
    count = memory.count_parameters(folder)
    if count is None:
        raise Failure(f"{folder} holds no *.safetensors files", "save the model with model.save_pretrained(folder)")
    bytes_needed = memory.estimate(count, dtype_name(config, dtype), count if train_all else 0)
    bytes_needed += memory.logits(step_tokens, config.get_text_config().vocab_size) + adapter_bytes
    what = "weights" + (", adapter" if adapter_bytes else "")
    what += ", gradients, optimizer and logits" if step_tokens else ""
    if step_tokens and config.get_text_config() is not config:
        print(f"{folder}: a {config.model_type} model: its text part alone is trained and saved", file=sys.stderr)
    facts = f"{folder}: {config.model_type}, {dtype_name(config, dtype)}, about {memory.gib(bytes_needed)} for {what}"
    print(facts, file=sys.stderr)  # standard output is for the result
    if not ignore_memory:
        fewer = ", --lora, fewer --batch-tokens" if step_tokens else ""
        memory.ensure(bytes_needed, str(folder), f"use --dtype bfloat16{fewer} or a smaller model")
    import transformers

    quiet()
    try:  # the whole path: an adapter keeps it as that of its base model
        model = transformers.AutoModelForCausalLM.from_pretrained(folder.resolve(), dtype=dtype, local_files_only=True)
    except (RuntimeError, ValueError) as error:
        raise Failure(f"{folder}: cannot be loaded: {first_line(error)}", "check weights and config.json") from None
    return model.eval()


def patch(model, name: str):
    """The handle of tidegate.patch(model)."""
    import tidegate
    from tidegate.errors import PatchError

    try:
        return tidegate.patch(model)
    except PatchError as error:
        raise Failure(f"{name} cannot be patched: {error}", f"see what was found:  tidegate report {name}") from None


def quiet():
    """No advice of Transformers to install GPU kernels, and no bars for loading."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def empty(name: str):
    """The model of a folder without memory for its weights."""
    folder = folder_of(name, or_family=True)
    import torch
    import transformers

    config = read_config(folder)
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
        self.tokenizer, self.missing = None, None
        if as_bytes:
            return
        folder = folder_of(name)
        if not any(folder.glob("tokenizer*")):
            self.missing = folder
            return
        import transformers

        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # noqa: BLE001  (Transformers and its Rust part raise whatever they like)
            raise Failure(
                f"{folder}: the tokenizer cannot be read: {first_line(error)}", "copy the tokenizer's files again"
            ) from None

    @property
    def end(self):
        """The token that ends a text, or None."""
        return None if self.tokenizer is None else self.tokenizer.eos_token_id

    def require(self):
        """Fails where text cannot become tokens; samples of ids need no tokenizer."""
        if self.missing:
            raise Failure(
                f"{self.missing} has no tokenizer",
                "copy the tokenizer's files into the folder; a model of bytes (as the demo's) wants --bytes",
            )

    def encode(self, text: str) -> list[int]:
        self.require()
        return list(text.encode()) if self.tokenizer is None else self.tokenizer(text)["input_ids"]

    def encode_chat(self, messages) -> list[int]:
        self.require()
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise Failure("messages need a tokenizer with a chat template", 'use lines with "text" instead')
        return self.tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]

    def decode(self, ids) -> str:
        if self.tokenizer is None:
            return bytes(int(i) & 255 for i in ids).decode(errors="replace")
        return self.tokenizer.decode(ids, skip_special_tokens=True)
