"""tidegate check: a whole model against itself, patched and not."""

from tidegate.cli import command, models

NAME = "check"
HELP = "patch a model and compare it with what it was"
DESCRIPTION = """\
Loads a model, patches it and runs tidegate.check: patched against original, packed against separate, padded against
unpadded, with a cache against all at once; logits and gradients. Ends with exit code 1 if a comparison fails."""
EXAMPLES = (
    "tidegate check qwen3_5_moe                     # a tiny random model of a family",
    "tidegate check ~/models/Qwen3.5-0.8B --dtype bfloat16",
    "tidegate check qwen3_next --unpatched          # what Transformers alone does",
)


def add_arguments(parser):
    models.add_arguments(parser, families=True)
    parser.add_argument("--unpatched", action="store_true", help="check the model as it is")
    parser.add_argument("--seed", type=command.seed, default=0, help="of the random tokens (default 0)")


def run(options):
    command.set_threads(options.threads)
    if options.model in models.families():
        model = models.tiny(options.model, options.dtype)
    else:
        model = models.load(options.model, options.dtype, options.ignore_memory, or_family=True)
    import tidegate

    if not options.unpatched:
        models.patch(model, options.model)
    return 0 if tidegate.check(model, seed=options.seed).ok else command.WRONG
