"""Run without the native library: every operator on its samples, and every wrong value of test_bad_input.py.

python fallback_rows.py <file>      writes the results, prints what is not refused as the native library does
"""

import sys

import torch
from samples import SAMPLES, operators, samples
from test_bad_input import EXPANDED, call_with, form, same_bits

from tidegate import fallback


def results(name):
    """Results and changed arguments of all samples of an operator."""
    torch.manual_seed(1)
    found = []
    for args, kwargs in samples(name):
        # Random states for a backward are no states: only the native library would read them. Factors rounded to bf16
        # are an option of CPUs that multiply them faster.
        kwargs = {k: v for k, v in kwargs.items() if k not in ("states", "precision")}
        args = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args]
        with torch.no_grad():
            made = form(name)(*args, **kwargs)
        made = [] if made is None else list(made) if isinstance(made, tuple) else [made]
        made = made[:2] if kwargs.get("save_states") else made
        found.append([*made, *(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))])
    return found


def wrong_values():
    """(operator, argument, what happened) for every row that is not refused with the right exception."""
    for name, argument, wrong, kind, _ in EXPANDED:
        base = name.partition(".")[0]
        if base not in fallback.KERNELS:
            continue
        given = call_with(name, argument)
        given[argument] = wrong(given) if callable(wrong) else wrong
        before = {k: v.clone() for k, v in given.items() if isinstance(v, torch.Tensor)}
        try:
            form(name)(**given)
            yield name, argument, "no error"
        except (ValueError, TypeError) as error:
            text = str(error)
            if type(error) is not kind or not text.startswith(f"{base}: ") or ": expected " not in text:
                yield name, argument, f"{type(error).__name__}: {text}"
        for k, value in before.items():
            if not same_bits(given[k], value):
                yield name, argument, f"{k} was changed"


if __name__ == "__main__":
    known = [name for name in operators() if name.partition(".")[0] in fallback.KERNELS]
    assert {name.partition(".")[0] for name in known} == SAMPLES.keys() & fallback.KERNELS.keys()
    torch.save({name: results(name) for name in known}, sys.argv[1])
    for row in wrong_values():
        print(row)
    print("rows done")
