"""Reading what the compiler says of registers, and what follows for occupancy."""

import pytest

from recipes.measured import resources

SAID = """
Resource usage:
 Common:
  GLOBAL:0
 Function custom_kernel_few_rows_tensor_0_bfloat16_t_4_64:
  REG:96 STACK:8 SHARED:4096 LOCAL:0 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function gather_float32:
  REG:20 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_only_our_kernels_are_read():
    assert list(resources.usages(SAID)) == [
        {
            "function": "custom_kernel_few_rows_tensor_0_bfloat16_t_4_64",
            "registers": 96,
            "stack": 8,
            "shared": 4096,
            "local": 0,
        }
    ]


def test_a_function_belongs_to_the_longest_name():
    names = ["few_rows", "few_rows_tensor", "rows"]
    assert resources.kernel_of("custom_kernel_few_rows_tensor_0_x", names) == "few_rows_tensor"
    assert resources.kernel_of("custom_kernel_fewer_0", names) is None


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "share"),
    [
        (32, 0, 128, 1.0),  # 65,536 / (32 x 128) = 16 threadgroups: all 2,048 threads
        (64, 0, 256, 0.5),
        (33, 0, 1024, 0.5),  # 40 x 1,024: one threadgroup
        (32, 100_000, 128, 0.125),  # two threadgroups' shared memory
        (255, 0, 128, 0.125),
    ],
)
def test_occupancy(registers, shared, threads, share):
    assert resources.occupancy(registers, shared, threads) == pytest.approx(share)
