"""PTX of kernels of Triton, and how what is launched is compared with it."""

import functools
import importlib.util
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import launched
from pallas_kernels.triton import launch


needs_triton = pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("triton") is None,
    reason="needs Triton, which is there for Linux: pip install '.[triton]'",
)
X = np.ones(8, np.float32)
SIZES = {"SIZE": 100, "BLOCK": 64}


@needs_triton
def test_ptx_is_compiled_once_and_has_the_pointers_of_triton():
    from pallas_kernels.triton import ptx
    from tests.kernels import toy

    compile_ = functools.partial(ptx.compiled, toy.by_parity_kernel, ["int32"] * 3)
    one = compile_(SIZES, 2, 80)
    assert one is compile_({"BLOCK": 64, "SIZE": 100}, 2, 80)
    assert (one.name, one.threads, one.shared) == ("by_parity_kernel", 64, 0)
    assert (one.pointers, ".target sm_80" in one.ptx) == (5, True)
    assert ".target sm_90a" in compile_(SIZES, 2, 90).ptx
    assert launched.without_lines(one.ptx) != launched.without_lines(
        compile_({"SIZE": 101, "BLOCK": 64}, 2, 80).ptx
    )
    with pytest.raises(TypeError, match="fewer pointers than 4"):
        ptx.compiled(toy.by_parity_kernel, ["int32"] * 4, SIZES, 2, 80)


@needs_triton
def test_the_ptx_of_jax_triton_is_compared_instruction_by_instruction(tmp_path):
    from tests.kernels import toy

    like = [jax.ShapeDtypeStruct((100,), jnp.int32)] * 3
    one = launch.Launch(
        toy.by_parity_kernel, 2, (like[0],), (), (*like[1:],), 4, False, SIZES
    )
    (code,) = launched.compiled([one, one])
    other = tmp_path / "theirs" / "by_parity_kernel.ptx"
    other.parent.mkdir()
    # Lines of the source may be others.
    other.write_text(re.sub(r"\.loc\t1 \d+", ".loc\t1 7", code.ptx))
    assert other.read_text() != code.ptx
    assert launched.differing([one], tmp_path) == []
    other.write_text(code.ptx.replace("st.global.b32", "st.global.b16"))
    assert len(launched.differing([one], tmp_path)) == 2
    launched.write([one, one], tmp_path)
    assert {path.name for path in (tmp_path / "0").iterdir()} == {
        "by_parity_kernel.ptx",
        "by_parity_kernel.ttir",
    }
    assert launched.too_large([one]) == []
