"""Reading the profiler's table."""

from recipes.measured import step_profile

SAID = """==PROF== Connected to process 7
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","7","python","h","void mlx::core::cu::qmv<(int)4, __nv_bfloat16>(const T1 *)","1","7","(32, 8, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","us","10.50"
"1","7","python","h","mlx::core::cu::custom_kernel_gated_delta_step_0_bfloat16_t_16_32(const bf16 *)","1","7","(512, 1, 1)","(32, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","nsecond","8,000"
"1","7","python","h","mlx::core::cu::custom_kernel_gated_delta_step_0_bfloat16_t_16_32(const bf16 *)","1","7","(512, 1, 1)","(32, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","Mbyte","2.10"
"1","7","python","h","mlx::core::cu::custom_kernel_gated_delta_step_0_bfloat16_t_16_32(const bf16 *)","1","7","(512, 1, 1)","(32, 1, 1)","0","9.0","Command line profiler metrics","launch__registers_per_thread","register/thread","96"
"2","7","python","h","void mlx::core::cu::qmv<(int)4, __nv_bfloat16>(const T1 *)","1","7","(32, 8, 1)","(1, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","us","1.50"
"""  # noqa: E501


def test_kernels_are_summed_by_name_the_longest_first():
    assert step_profile.read(SAID) == [
        {"kernel": "qmv", "launches": 2, "us": 12.0, "threadgroups": 1, "threads": 256},
        {
            "kernel": "gated_delta_step",
            **{"launches": 1, "us": 8.0, "threadgroups": 32, "threads": 512},
            **{"read_bytes": 2_100_000, "registers": 96},
        },
    ]
