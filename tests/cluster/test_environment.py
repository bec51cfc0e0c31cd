"""Environment variables that cannot be what was meant: one error, before anything waits."""

import pytest

from deberta_ds.base.errors import UserError
from deberta_ds.cluster.launcher import RANK_VARIABLES, check_environment

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "4",
         "CUDA_VISIBLE_DEVICES": "0,1", "DS_ACCELERATOR": "cuda"}


@pytest.mark.parametrize("environ", [
    {}, WHOLE, WHOLE | {"OMP_NUM_THREADS": "4,2"}, WHOLE | {"CUDA_VISIBLE_DEVICES": ""},
    WHOLE | {"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"},
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
     "MASTER_PORT": "0"}])
def test_what_launchers_set_is_accepted(environ):
    check_environment(environ)


@pytest.mark.parametrize(("name", "value"), [
    ("RANK", "foo"), ("RANK", "-1"), ("RANK", ""), ("RANK", "2"), ("RANK", "1.0"),
    ("RANK", "9" * 30), ("RANK", "\u0661"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "two"),
    ("LOCAL_RANK", "x"), ("LOCAL_RANK", "7"), ("LOCAL_WORLD_SIZE", "3"),
    ("MASTER_PORT", "abc"), ("MASTER_PORT", "0"), ("MASTER_PORT", "65536"), ("MASTER_PORT", "-1"),
    ("MASTER_ADDR", ""), ("MASTER_ADDR", "no such host"), ("OMP_NUM_THREADS", "0"),
    ("OMP_NUM_THREADS", "many"), ("OMP_NUM_THREADS", "-2"), ("CUDA_VISIBLE_DEVICES", "first"),
    ("CUDA_VISIBLE_DEVICES", "0,,1"), ("CUDA_VISIBLE_DEVICES", "0,0"), ("DS_ACCELERATOR", "gpu")])
def test_nonsense_is_named_with_its_value(name, value):
    with pytest.raises(UserError, match=rf"{name} = ('{value}'|{value} does not|\d does not)"):
        check_environment(WHOLE | {name: value})


def test_a_rank_without_the_rest_is_named():
    with pytest.raises(UserError, match="RANK is set but WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, "
                                        "MASTER_PORT are not; set all five"):
        check_environment({"RANK": "0"})
    for name in RANK_VARIABLES[1:]:  # without LOCAL_RANK, DeepSpeed would ask MPI
        with pytest.raises(UserError, match=f"RANK is set but {name} is not"):
            check_environment({key: value for key, value in WHOLE.items() if key != name})
    with pytest.raises(UserError) as caught:
        check_environment({"RANK": "a", "WORLD_SIZE": "b", "MASTER_PORT": "c"})
    assert all(f"{name} = " in str(caught.value) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
