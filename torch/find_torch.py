"""Prints the include folder of the torch this interpreter would use, also from inside pip's isolated build."""

import importlib.util
import pathlib
import sys
import sysconfig


def find():
    spec = importlib.util.find_spec("torch")
    places = [pathlib.Path(p) for p in spec.submodule_search_locations] if spec else []
    # Build isolation hides the environment's packages from sys.path, but not from the file system.
    places.append(pathlib.Path(sysconfig.get_paths()["purelib"]) / "torch")
    for place in places:
        if (place / "include/torch/csrc/stable/library.h").exists():
            return place / "include"
    return None


if __name__ == "__main__":
    include = find()
    if include is None:
        sys.exit("torch >= 2.10 was not found: pip install 'torch>=2.10' first")
    print(include)
