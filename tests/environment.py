"""Sets the environment of the tests, before JAX is imported; the processes that they
start inherit it.

Most of the tests' time goes to compiling, so XLA spends little on making programs fast,
and the processes of one run, scripts included, share what they compile.
`JMAT_TEST_OPTIMISED=1` has programs compiled as users' are.
"""

import atexit
import importlib.metadata
import os
import tempfile

# the first process; workers and scripts inherit what it sets
if "JMAT_TEST_CHILD" not in os.environ:
    os.environ["JMAT_TEST_CHILD"] = "1"
    programs = tempfile.TemporaryDirectory(prefix="jmat-programs-")
    atexit.register(programs.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    quickly = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        "--xla_cpu_parallel_codegen_split_count=1"
    )
    version = importlib.metadata.version("jaxlib")
    if tuple(map(int, version.split(".")[:2])) < (0, 11):  # later ones abort at this flag
        quickly += " --xla_cpu_use_fusion_emitters=false"
    os.environ["JMAT_TEST_XLA"] = "" if "JMAT_TEST_OPTIMISED" in os.environ else quickly
os.environ["XLA_FLAGS"] = f"{os.environ['JMAT_TEST_XLA']} --xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
