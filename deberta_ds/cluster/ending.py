"""How a job ended, for the script that started it.

Exit codes get lost on the way: `srun` returns the highest of all tasks' codes, which is 137 for one
that it killed itself, and some launchers return 1 for everything. So a job that stopped at a
checkpoint, or that the watchdog ended, says so in the file that RUN_END_FILE names:

    75              saved: run the same command again
    70 node3,node7  a rank was stuck or dead; the hosts that it names, if any, are to be avoided
"""

import os

from deberta_ds.files import write_atomic

VARIABLE = "RUN_END_FILE"


def record(code: int, hosts: set[str] = frozenset()) -> None:
    """Write how the job ended, if anybody asked for it; a file that cannot be written is lost."""
    if path := os.environ.get(VARIABLE):
        try:
            write_atomic(path, f"{code} {','.join(sorted(hosts))}".strip() + "\n")
        except OSError:
            pass


def record_first(code: int, hosts: set[str]) -> None:
    """As `record`, unless a rank has already written this code: the first report knows best."""
    try:
        with open(os.environ.get(VARIABLE, "")) as file:
            if file.read().split()[0] == str(code):
                return
    except (OSError, IndexError):
        pass
    record(code, hosts)
