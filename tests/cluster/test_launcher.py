"""Every launcher's variables become the same five, and what cannot be found is said."""

import os
import shutil
import subprocess
import sys

import pytest
import rank_helpers
from data_helpers import run_main
from launching import ENVIRONMENT, ROOT, deepspeed_json, make_run

from deberta_ds.base.errors import EXIT_REQUEUE, UserError
from deberta_ds.cluster import launcher
from deberta_ds.cluster.launcher import check_environment, rank_variables

SRUN = {"SLURM_JOB_ID": "71234", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "16", "SLURM_STEP_NODELIST": "gpu7,gpu9"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
          "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
          "PMIX_NAMESPACE": "1234500001"}
TWO_HOSTS = MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
         "MASTER_PORT": "0"}


@pytest.mark.parametrize("environ, found", [
    ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}, {}), ({}, ALONE),
    ({"RANK": "0", "WORLD_SIZE": "1"}, {name: ALONE[name] for name in (
        "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}),
    ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, ALONE),
    (SRUN, {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu7",
            "MASTER_PORT": "31234"}),
    (SRUN | {"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "8"},
     {"RANK": "5", "LOCAL_RANK": "1", "MASTER_PORT": "31234"}),
    (MPIRUN, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": "20001"}),
    (TWO_HOSTS | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
     {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}),
    (TWO_HOSTS, {"LOCAL_RANK": "0"})],  # MPI answers the rest
    ids=["torchrun and deepspeed", "none", "one rank by hand", "a batch script without srun",
         "srun", "srun with an address", "mpirun on one host", "on two",
         "on two without an address"])
def test_what_a_launcher_has_not_said_itself(environ, found):
    assert rank_variables(environ) == found


@pytest.mark.parametrize("environ, refusal", [
    ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK = 1 does not fit WORLD_SIZE = 1"),
    ({"WORLD_SIZE": "4"}, "WORLD_SIZE = '4' is set, but RANK is not"),
    (MPIRUN | {"WORLD_SIZE": "4"}, "= 4, not 2; it is left over"),
    (SRUN | {"WORLD_SIZE": "16"}, "= 16, not 8; it is left over"),
    ({"OMPI_COMM_WORLD_RANK": "0"},
     "some of its variables, but not OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK"),
    ({"SLURM_STEP_NUM_TASKS": "2"},
     "some of its variables, but not SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NODELIST"),
    ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
     "some of its variables, but not SLURM_STEP_NODELIST")])
def test_what_is_left_over_or_no_launcher_has_set_is_refused(environ, refusal):
    with pytest.raises(UserError, match=refusal):
        check_environment(environ | rank_variables(environ))


def test_srun_with_a_list_of_hosts(monkeypatch, tmp_path):
    fake = tmp_path / "scontrol"
    fake.write_text("#!/bin/sh\necho gpu03\necho gpu04\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    environ = SRUN | {"SLURM_STEP_NODELIST": "gpu[03-04]"}
    assert rank_variables(environ)["MASTER_ADDR"] == "gpu03"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="set MASTER_ADDR"):
        rank_variables(environ)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs openmpi-bin")
def test_the_mpirun_script_leaves_each_rank_all_cores(tmp_path):
    """By itself mpirun pins two ranks to a core each: their loaders and threads share it."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\ntaskset -cp $$\n")
    program.chmod(0o755)
    done = subprocess.run(
        [ROOT / "launch/cluster/openmpi.sh", "localhost:2"], capture_output=True, text=True,
        timeout=60, env=os.environ | {"PYTHON": str(program), "INTERFACE": "lo", "MPIRUN_ARGS":
                                      "--allow-run-as-root --oversubscribe"})
    own = subprocess.run(["taskset", "-cp", str(os.getpid())], capture_output=True, text=True)
    cores = own.stdout.split(": ")[1].strip()
    assert [line.split(": ")[1] for line in done.stdout.splitlines()] == [cores] * 2, done


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs openmpi-bin")
@pytest.mark.parametrize("code", [0, EXIT_REQUEUE])
def test_mpirun_returns_the_code_of_ranks_that_have_met_mpi(tmp_path, code):
    pytest.importorskip("mpi4py")
    program = tmp_path / "rank.py"
    program.write_text(
        "import torch.distributed as torch_dist\n"
        "from mpi4py import MPI\n"
        "from deberta_ds.cluster import dist\n"
        "from deberta_ds.base.errors import exit_cleanly\n"
        f"torch_dist.init_process_group('gloo', init_method='file://{tmp_path}/store',\n"
        "                              rank=MPI.COMM_WORLD.rank, world_size=2)\n"
        "assert dist.has_gloo_threads()\n"
        f"exit_cleanly(lambda: {code})\n")
    done = subprocess.run(
        ["mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe", sys.executable, program],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == code and "improperly" not in done.stdout + done.stderr, done


def test_minimal_pairs_are_shared_by_ranks_that_only_mpi_knows(monkeypatch):
    def join():
        raise UserError("joined")

    for name in launcher.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setattr("deberta_ds.engine.engine.init_distributed", join)
    with pytest.raises(UserError, match="^joined$"):
        run_main("launch/minimal_pairs.py", "--model", "none", "--data", "none")


def test_an_mpi4py_of_another_mpi_is_one_error(tmp_path, monkeypatch):
    """MPICH of Debian calls its library otherwise: every rank ended with a traceback."""
    with monkeypatch.context() as patch, pytest.raises(
            UserError, match="needs mpi4py to find the ranks, .*mpirun -x MASTER_ADDR"):
        patch.setitem(sys.modules, "mpi4py", None)  # an ImportError
        launcher.meet_mpi()
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").touch()
    (tmp_path / "mpi4py/MPI.py").write_text("raise RuntimeError('libmpi.so.12: no such file')\n")
    run = make_run(tmp_path)
    done = subprocess.run(
        [sys.executable, ROOT / "launch/pretrain.py", "--config", run, "--deepspeed_config",
         deepspeed_json(tmp_path / "ds.json", stage=1)], capture_output=True, text=True,
        env=ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PMI_RANK": "0"})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "mpi4py cannot be used (libmpi.so.12: no such file); build one" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("codes, starts, end", [("70 75", 2, 75), ("2", 1, 2)])
def test_elastic_torchrun_does_not_start_again_what_has_ended_for_good(tmp_path, codes, starts,
                                                                       end):
    rank = tmp_path / "rank.py"
    rank.write_text("import sys\nfrom pathlib import Path\n"
                    f"log = Path({str(tmp_path / 'log')!r})\n"
                    "done = len(log.read_text()) if log.exists() else 0\n"
                    "log.write_text('x' * (done + 1))\n"
                    f"sys.exit({[int(code) for code in codes.split()]}[done])\n")
    with rank_helpers.quick_python(tmp_path) as python:
        done = subprocess.run(
            [python, ROOT / "launch/cluster/torchrun_elastic.py", "--standalone",
             "--nproc-per-node=1", "--max-restarts=1000", "--monitor-interval=0.1", str(rank)],
            env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, len((tmp_path / "log").read_text())) == (end, starts), done.stderr


def test_ancestors_with_names_that_the_kernel_has_cut(tmp_path):
    """It keeps 15 bytes of a name, here half of its last letter."""
    script = tmp_path / "abcdefghijklmnö.sh"
    script.write_text(f"#!/bin/sh\n{sys.executable} -c 'from deberta_ds.cluster import signals; "
                      "signals.Launcher()'\n:\n")
    script.chmod(0o755)
    done = subprocess.run([script], capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)
    assert done.returncode == 0 and not done.stderr
