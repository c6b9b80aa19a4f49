"""scikit-build-core, plus one rule: torch is a build requirement only where the environment has none.

Building needs torch's headers. Asking for torch unconditionally would make pip download several gigabytes into its
isolated build environment although the target environment has the same package already.
"""

import pathlib
import sysconfig

from scikit_build_core.build import *  # noqa: F403
from scikit_build_core.build import get_requires_for_build_wheel as _requires


def get_requires_for_build_wheel(config_settings=None):
    header = pathlib.Path(sysconfig.get_paths()["purelib"], "torch/include/torch/csrc/stable/library.h")
    return _requires(config_settings) + ([] if header.exists() else ["torch>=2.10"])


def get_requires_for_build_editable(config_settings=None):
    return get_requires_for_build_wheel(config_settings)
