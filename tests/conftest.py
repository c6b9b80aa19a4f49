import signal

import pytest
import torch

import tidegate

# Programs in the background of a script are started with Ctrl-C ignored, and so would be all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fresh_state():
    """Every test starts with the same random numbers and leaves threads and instruction set as it found them."""
    torch.manual_seed(0)
    threads, isa = torch.get_num_threads(), tidegate.isa()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    tidegate.set_isa(isa)


@pytest.fixture(params=tidegate.report()["isa available"].split(", "))
def isa(request):
    """Every instruction set that this CPU has, one after the other."""
    tidegate.set_isa(request.param)
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny model of bytes."""
    from tidegate.check.tiny import build

    path = tmp_path_factory.mktemp("models") / "tiny"
    build("qwen3_5_moe", vocab_size=256).save_pretrained(path)
    return path


@pytest.fixture
def run(capsys):
    """The command `tidegate`: run(*arguments) -> exit code, output, errors."""
    from tidegate import cli

    def call(*arguments):
        code = cli.main([str(a) for a in arguments])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call
