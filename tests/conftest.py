"""Set before jax is imported: the suite runs on the CPU, and libtpu only compiles."""

import os
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-8"
# Compiling, not running, is what these small programs cost: this takes a third off.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8"
)
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
# Tests, workers, the scripts that tests start, and the next run compile the same programs. A bound
# on the size makes JAX lock the folder.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parents[1] / ".jax_cache")
os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2 << 30)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import jax
from hypothesis import HealthCheck, settings

drawn = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("suite", max_examples=8, derandomize=True, **drawn)
settings.register_profile("long", max_examples=1000, **drawn)
settings.load_profile("suite")

MEMORY_MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def few_memory_maps():
    """Forget compiled programs before they hold all 65,530 memory maps of a Linux process."""
    yield
    if MEMORY_MAPS.exists() and MEMORY_MAPS.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
