"""The engine of the patch layer, on modules of its own: all or nothing, the way back, copies, conflicts."""

import copy
import functools
import io
import types
import warnings

import pytest
import torch
from torch import nn

import tidegate
from tidegate.errors import NothingPatchedError, OptionError, PatchConflictError, PatchError, SelfTestError
from tidegate.patch import ForwardSite, call_original, engine


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x, *, shift=0):
        return x * self.weight + shift


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Scale(), Scale(), Scale()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, shift=1)
        return x


calls = []


def forward_of_ours(self, x, *, shift=0):
    calls.append(shift)
    return call_original(self, "rmsnorm", x, shift=shift)


def find(root, options):
    return [
        ForwardSite(path, "rmsnorm", module, "I:toy", forward_of_ours, known=False)
        for path, module in root.named_modules()
        if isinstance(module, Scale)
    ]


find.ops = ("rmsnorm",)
X = torch.arange(3.0)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(engine, "finders", lambda: [find])
    calls.clear()


def dicts(model):
    return [{k: id(v) for k, v in m.__dict__.items()} for m in model.modules()]


def test_installs_reports_and_undoes():
    net = Net()
    before, names, expected = dicts(net), list(net.state_dict()), net(X)
    handle = tidegate.patch(net)
    assert torch.equal(net(X), expected) and calls == [1, 1, 1]
    rows = handle.report()
    assert [row.path for row in rows] == ["layers.0", "layers.1", "layers.2"] == [r.path for r in tidegate.report(net)]
    assert {row.status for row in rows} <= {"installed", "fallback"} and "I:toy" in str(rows)
    assert list(net.state_dict()) == names
    handle.undo()
    assert dicts(net) == before and torch.equal(net(X), expected) and len(calls) == 3
    assert not tidegate.report(net) and not tidegate.unpatch(net)


def test_context_manager_undoes_after_an_error():
    net = Net()
    before = dicts(net)
    with pytest.raises(KeyError), tidegate.patch(net):
        raise KeyError
    assert dicts(net) == before


def test_twice_is_once_and_other_options_conflict():
    net = Net()
    handle = tidegate.patch(net)
    before = dicts(net)
    assert tidegate.patch(net) is handle and dicts(net) == before
    with pytest.raises(PatchConflictError, match=r"rope: True -> False.*replace=True"):
        tidegate.patch(net, options={"rope": False})
    assert dicts(net) == before
    other = tidegate.patch(net, options={"rope": False}, replace=True)
    assert other is not handle and tidegate.patch(net, options={"rope": False}) is other


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_leaves_nothing_behind(monkeypatch, failing):
    net = Net()
    before, install, count = dicts(net), ForwardSite._install, []

    def breaks(self):
        count.append(0)
        if len(count) > failing:
            raise MemoryError("planted")
        install(self)

    monkeypatch.setattr(ForwardSite, "_install", breaks)
    with pytest.raises(MemoryError, match="planted"):
        tidegate.patch(net)
    assert dicts(net) == before and tidegate.report(net) == []


def test_a_lost_site_is_seen_and_repaired():
    net = Net()
    handle = tidegate.patch(net)
    net.layers[1].forward = types.MethodType(Scale.forward, net.layers[1])  # what kernelize does
    assert [row.status for row in handle.report()].count("lost") == 1
    assert tidegate.patch(net) is handle and not handle.report().only(status="lost")
    del net.layers[1].forward
    assert handle.report()[1].status == "lost"
    handle.undo()
    assert "forward" not in net.layers[0].__dict__


def test_someone_elses_forward_is_not_overwritten():
    net = Net()
    net.layers[0].forward = functools.partial(Scale.forward, net.layers[0])
    with pytest.raises(PatchError, match="layers.0: forward already replaced by"):
        tidegate.patch(net)
    assert "forward" not in net.layers[1].__dict__


def test_wrapped_by_someone_else():
    net = Net()
    expected = net(X)
    handle = tidegate.patch(net)
    inner = net.layers[0].forward
    net.layers[0].forward = lambda *args, **kwargs: inner(*args, **kwargs)
    assert handle.report()[0].status == "installed"
    with pytest.warns(UserWarning, match="layers.0"):
        handle.undo()
    assert torch.equal(net(X), expected) and calls == []
    assert [row.status for row in handle.report()] == ["inactive"]
    assert tidegate.patch(net).report()[0].status == "installed"  # and can be switched on again
    net(X)
    assert calls == [1, 1, 1]


def test_copies_are_patched_and_undoable():
    net = Net()
    before = dicts(net)
    handle = tidegate.patch(net)
    twin = copy.deepcopy(net)
    assert twin.layers[0].forward.__self__ is twin.layers[0]
    twin.layers[0].weight.data.zero_()
    assert torch.equal(twin.layers[0](X), torch.zeros(3)) and calls == [0]
    handle.undo()
    assert dicts(net) == before and len(tidegate.report(twin)) == 3
    assert tidegate.patch(twin) is not handle and tidegate.unpatch(twin)
    assert "forward" not in twin.layers[0].__dict__ and "_tidegate" not in twin.layers[0].__dict__
    part = copy.deepcopy(tidegate.patch(net).model.layers[0])
    assert len(tidegate.report(part)) == 1 and tidegate.unpatch(part)


def test_saved_models_load_unpatched():
    net = Net()
    expected = net(X)
    tidegate.patch(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(X), expected) and calls == [] and not tidegate.report(loaded)
    assert len(tidegate.patch(loaded).report().only(status="installed")) == 3


def test_the_model_inside_an_object():
    holder = types.SimpleNamespace(model=Net())
    handle = tidegate.patch(holder)
    assert handle is tidegate.patch(holder.model)
    with pytest.raises(TypeError, match=r"\.model, \.module, got int"):
        tidegate.patch(3)


def test_compiled_modules(monkeypatch):
    net = Net()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    expected = compiled(X)

    def traced(self, x, *, shift=0):
        return call_original(self, "rmsnorm", x, shift=shift) + 100

    engine_find = lambda root, options: [ForwardSite("layers.0", "rmsnorm", net.layers[0], "I", traced)]  # noqa: E731
    engine_find.ops = ("rmsnorm",)
    monkeypatch.setattr(engine, "finders", lambda: [engine_find])
    handle = tidegate.patch(compiled)
    assert handle.report()[0].path == "layers.0"
    assert torch.equal(compiled(X), net(X)) and not torch.equal(compiled(X), expected)
    handle.undo()
    assert torch.equal(compiled(X), expected)


def test_nothing_found():
    with pytest.raises(NothingPatchedError, match="Classes seen: Linear"):
        tidegate.patch(nn.Linear(2, 2))
    with pytest.raises(NothingPatchedError, match="no place for 'rope'"):
        tidegate.patch(Net(), ops=["rmsnorm", "rope"])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert tidegate.patch(nn.Linear(2, 2), strict=False).installed == []
    assert len(seen) == 1 and "found nothing" in str(seen[0].message)


def test_names_that_nobody_knows():
    with pytest.raises(OptionError, match="unknown op 'rmsnrm'; did you mean rmsnorm"):
        tidegate.patch(Net(), ops="rmsnrm")
    with pytest.raises(OptionError, match="scope"):
        tidegate.patch(Net(), scope="thread")
    with pytest.raises(OptionError, match="check"):
        tidegate.patch(Net(), check="never")


def test_switches(monkeypatch):
    net = Net()
    monkeypatch.setenv("TIDEGATE_RMSNORM", "off")
    with pytest.raises(NothingPatchedError, match="rmsnorm is off .TIDEGATE_RMSNORM."):
        tidegate.patch(net)
    monkeypatch.setenv("TIDEGATE_PATCH", "0")
    handle = tidegate.patch(net)
    assert handle.sites == [] and "enabled is off (TIDEGATE_PATCH)" in str(handle.report())
    monkeypatch.setenv("TIDEGATE_PATHC", "0")
    with pytest.raises(OptionError, match="TIDEGATE_PATCH"):
        tidegate.patch(net)


def test_self_tests(monkeypatch):
    def fails():
        raise SelfTestError("differs by 1")

    def finder(root, options):
        sites = find(root, options)
        sites[1].test, sites[0].test = fails, lambda: "err 0"
        return sites

    finder.ops = find.ops
    monkeypatch.setattr(engine, "finders", lambda: [finder])
    rows = tidegate.patch(Net()).report()  # unknown families are refused, known ones raise
    assert rows[1].status == "refused" and rows[1].reason == "differs by 1" and rows[0].checked == "err 0"
    rows = tidegate.patch(Net(), check="off").report()
    assert rows[0].status == "refused" and "must be tested" in rows[0].reason
    monkeypatch.setattr(engine, "finders", lambda: [known])

    def known(root, options):
        sites = finder(root, options)
        for site in sites:
            site.known = True
        return sites

    known.ops = find.ops
    with pytest.raises(SelfTestError, match="layers.1: differs by 1"):
        tidegate.patch(Net())
    assert tidegate.patch(Net(), strict=False).report()[1].status == "refused"
    assert tidegate.patch(Net(), check="off").report()[1].checked == "unchecked: check is off"


def test_the_name_that_trainers_call():
    net = Net()
    assert tidegate.kernelize_model(net, mode="train") is net and len(tidegate.report(net)) == 3
    net = Net()
    assert tidegate.kernelize_model(net, device="cuda:0") is net and not tidegate.report(net)
    with pytest.raises(PatchError, match="got cuda"):
        tidegate.kernelize_model(net, device="cuda", use_fallback=False)
    with pytest.raises(NothingPatchedError):
        tidegate.kernelize_model(nn.Linear(2, 2), use_fallback=False)
