"""StatePool: snapshots, forks, roll-back and files, on decode steps of a layer stack, compared bit for bit."""

import importlib.util
import pathlib

import pytest
import torch
from compare import assert_bits

import tidegate

LAYERS, HK, HV, K, V, W = 2, 1, 2, 16, 24, 4
SIZES = {"HK": HK, "HV": HV, "K": K, "V": V}
D = 2 * HK * K + HV * V
WEIGHTS = [(torch.randn(D, W) / 2, None, torch.rand(HV), torch.randn(HV)) for _ in range(LAYERS)]
TOKENS = [[torch.randn(40, n) for n in (D, HV * V, HV, HV)] for _ in range(LAYERS)]  # what every layer would project
NORM = torch.randn(V)


def make(drafts=3, sequences=3, **options):
    return tidegate.StatePool(LAYERS, sequences, **SIZES, drafts=drafts, dtype=torch.float32, **options)


def run(pool, sequence, first, last):
    """Tokens [first, last) through all layers; y of every layer. What became final, the caller tells the sequence."""
    out = []
    for i in range(LAYERS):
        conv, state = pool.layer(i)
        weight, bias, A_log, dt_bias = WEIGHTS[i]
        out.append(
            tidegate.gdn_packed_decode(
                *[t[first:last] for t in TOKENS[i]],
                conv,
                weight,
                bias,
                A_log,
                dt_bias,
                state,
                NORM,
                cu_seqlens=torch.tensor([0, last - first]),
                conv_indices=pool.rows([sequence]),
                **pool.indices([sequence]),
                **SIZES,
            )
        )
    return torch.stack(out)


def steps(pool, sequence, first, last):
    out = []
    for t in range(first, last):
        out.append(run(pool, sequence, t, t + 1))
        sequence.advance(1)
    return torch.cat(out, 1)


@pytest.fixture
def plain():
    """y of 40 steps of one sequence."""
    pool = make()
    return steps(pool, pool.open(), 0, 40)


def test_verification_with_every_accepted_count(plain):
    pool = make()
    sequence = pool.open()
    while sequence.tokens < 32:
        for accepted in range(1, 5):
            first = sequence.tokens
            got = run(pool, sequence, first, first + 4)
            assert_bits("y", got, plain[:, first : first + 4])
            sequence.accept(accepted)


@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_a_snapshot_is_continued_as_if_never_interrupted(plain, accepted):
    """Taken after a verification, put back into another sequence of another pool."""
    pool = make()
    sequence = pool.open()
    steps(pool, sequence, 0, 5)
    run(pool, sequence, 5, 9)
    sequence.accept(accepted)
    snapshot = pool.snapshot(sequence)
    assert snapshot.tokens == 5 + accepted
    kept = [t.clone() for t in (snapshot.conv, snapshot.state)]
    assert_bits("y", steps(pool, sequence, 5 + accepted, 20), plain[:, 5 + accepted : 20])
    for t, before in zip((snapshot.conv, snapshot.state), kept, strict=True):
        assert_bits("snapshot", t, before)
    other = make(drafts=0, sequences=1)
    later = other.open()
    other.restore(snapshot, later)
    assert later.tokens == 5 + accepted
    assert_bits("y", steps(other, later, 5 + accepted, 20), plain[:, 5 + accepted : 20])
    pool.restore(snapshot, sequence)  # and back into its own place
    assert_bits("y", steps(pool, sequence, 5 + accepted, 20), plain[:, 5 + accepted : 20])


def test_forks_go_their_own_ways(plain):
    pool = make()
    first = pool.open()
    steps(pool, first, 0, 6)
    run(pool, first, 6, 10)
    first.accept(2)
    second = pool.fork(first)
    assert_bits("y", run(pool, second, 20, 23), run(pool, first, 20, 23))
    second.accept(3)
    third = pool.open()
    steps(pool, third, 0, 8)
    pool.copy(third, first)
    assert_bits("y", steps(pool, first, 8, 12), plain[:, 8:12])
    assert_bits("y", steps(pool, third, 8, 12), plain[:, 8:12])


def test_settled_sequences_take_prompts(plain):
    pool = make()
    sequence = pool.open()
    run(pool, sequence, 0, 4)
    sequence.accept(3)
    with pytest.raises(ValueError, match="expected settled ones, got 3 accepted"):
        pool.indices([sequence], per_token=False)
    pool.settle(sequence)
    assert pool.indices([sequence], per_token=False)["state_indices"].tolist() == [sequence.slots[0]]
    assert sorted(sequence.slots) == list(range(sequence.slots[0] // 4 * 4, sequence.slots[0] // 4 * 4 + 4))
    assert_bits("y", steps(pool, sequence, 3, 12), plain[:, 3:12])


def test_opened_places_remember_nothing(plain):
    pool = make(sequences=1)
    first = pool.open()
    steps(pool, first, 10, 20)
    with pytest.raises(RuntimeError, match="expected a free row, got 1 sequences in use"):
        pool.open()
    pool.close(first)
    with pytest.raises(ValueError, match="expected an open one"):
        pool.close(first)
    assert_bits("y", steps(pool, pool.open(), 0, 5), plain[:, :5])


def test_states_of_other_types_and_orders():
    for options in ({"state_dtype": torch.bfloat16}, {"state_v_first": True}):
        pool = make(**options)
        sequence = pool.open()
        flag = {"state_v_first": True} if "state_v_first" in options else {}
        assert pool.layer(0)[1].shape[2:] == ((V, K) if flag else (K, V))
        snapshot = pool.snapshot(sequence)
        assert snapshot.state.dtype == options.get("state_dtype", torch.float32)
        other = make()
        if flag:  # the order of a state is turned around, its type is not
            continue
        with pytest.raises(ValueError, match="snapshot.state: expected"):
            other.restore(snapshot, other.open())


def test_a_snapshot_knows_the_order_of_its_state():
    pool, flipped = make(), make(state_v_first=True)
    sequence, later = pool.open(), flipped.open()
    pool.state.normal_()
    snapshot = pool.snapshot(sequence)
    flipped.restore(snapshot, later)
    assert_bits("state", flipped.state[:, later.slots[0]].mT, snapshot.state)
    pool.restore(flipped.snapshot(later), sequence)
    assert_bits("state", pool.state[:, sequence.slots[0]], snapshot.state)


def test_only_open_sequences_of_the_pool_are_taken():
    pool, other = make(), make()
    closed = pool.open()
    pool.close(closed)
    again = pool.open()
    assert again.row == closed.row
    for stranger in (closed, other.open()):
        for call in (
            pool.close,
            pool.settle,
            pool.snapshot,
            pool.fork,
            lambda s: pool.indices([s]),
            lambda s: pool.rows([s]),
            lambda s: pool.copy(again, s),
            lambda s: pool.restore(pool.snapshot(again), s),
        ):
            with pytest.raises(ValueError, match="sequence: expected an open one of this pool, got one with row 0"):
                call(stranger)
    assert len(pool._free) == 2 and len({s.row for s in (again, pool.open(), pool.open())}) == 3


def test_no_sequences():
    pool = make()
    indices = pool.indices([])
    assert indices["state_indices"].shape == (0, 4) and indices["state_indices"].dtype == torch.int64
    assert indices["num_accepted_tokens"].dtype == pool.rows([]).dtype == torch.int64
    assert pool.indices([], per_token=False)["state_indices"].dtype == torch.int64


def test_what_files_keep(tmp_path):
    pytest.importorskip("safetensors")
    pool = make(state_v_first=True)
    pool.state.normal_()
    snapshot = pool.snapshot(pool.open())
    tidegate.save_snapshots(tmp_path / "two", {"a": snapshot, "b.c": snapshot})
    for found in tidegate.load_snapshots(tmp_path / "two").values():
        assert found.state_v_first and found.tokens == snapshot.tokens
        assert_bits("state", found.state, snapshot.state)
    tidegate.save_snapshots(tmp_path / "none", {})
    assert tidegate.load_snapshots(tmp_path / "none") == {}
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match="path: expected a file of save_snapshots"):
        tidegate.load_snapshots(tmp_path / "other")


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"drafts": -1}, "drafts: expected a whole number >= 0, got -1"),
        ({"width": 1}, "width: expected 2 to 4, got 1"),
        ({"HK": 3}, "HV: expected a multiple of 3"),
        ({"state_dtype": torch.float16}, "state_dtype: expected dtype float32 or bfloat16"),
        ({"dtype": torch.float64}, "dtype: expected dtype float32, bfloat16 or float16"),
        ({"sequences": 0}, "sequences: expected a whole number >= 1, got 0"),
    ],
)
def test_wrong_pools_are_refused(wrong, text):
    with pytest.raises((ValueError, TypeError), match=text):
        tidegate.StatePool(**{"layers": 1, "sequences": 1, **SIZES, **wrong})


def test_wrong_use_is_refused():
    pool = make()
    sequence = pool.open()
    for count in (0, 5):
        with pytest.raises(ValueError, match=f"accept: count: expected 1 to 4, got {count}"):
            sequence.accept(count)
    with pytest.raises(ValueError, match="expected another sequence"):
        pool.copy(sequence, sequence)
    wrong = tidegate.StatePool(LAYERS, 1, HK=HK, HV=HV, K=K, V=V + 1, dtype=torch.float32)
    with pytest.raises(ValueError, match="snapshot.conv: expected"):
        pool.restore(wrong.snapshot(wrong.open()), sequence)


def test_files(tmp_path, plain):
    pytest.importorskip("safetensors")
    pool = make()
    sequence = pool.open()
    steps(pool, sequence, 0, 7)
    early = pool.snapshot(sequence)
    steps(pool, sequence, 7, 9)
    tidegate.save_snapshots(tmp_path / "states.safetensors", {"early": early, "late": pool.snapshot(sequence)})
    loaded = tidegate.load_snapshots(tmp_path / "states.safetensors")
    assert {name: s.tokens for name, s in loaded.items()} == {"early": 7, "late": 9}
    pool.restore(loaded["early"], sequence)
    assert_bits("y", steps(pool, sequence, 7, 12), plain[:, 7:12])


def test_the_example_runs(capsys):
    path = pathlib.Path(__file__).parents[1] / "examples" / "states.py"
    spec = importlib.util.spec_from_file_location("states", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    printed = capsys.readouterr().out
    assert "tokens processed, same bits as all of them: True" in printed
    assert "same tokens as one by one: True" in printed
