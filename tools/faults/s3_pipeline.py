"""One corpus from a bucket to a training run that starts before all is there. Not run by pytest.

    python tools/faults/s3_pipeline.py --text DIR_OF_TXT --against EVALUATION_FILES --scratch DIR

A real S3 server (moto) runs here, behind a proxy that cuts every fifth connection in the middle and
delays every third answer; while the run reads its rows it also flips a bit in every seventh answer.
Raw text, tokenizer, findings and corpora lie in the bucket. The same on local files must give the
same corpora, and the run the same losses, bit for bit. Prints the commands and figures, writes
benchmarks/results/data_s3.json. Needs moto_server in the PATH (pipx install "moto[server]"): its
botocore and this project's pandas want different versions of dateutil.
"""

import argparse
import gzip
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from launching import wait_for_server  # noqa: E402
from rank_helpers import free_port  # noqa: E402

PREP = "data_prep"
FILTERS = 'use = ["language", "repetition", "gopher", "lines", "personal"]\n'
FILTERS += '[language]\nkeep = ["en"]\n[lines]\nend_mark = false\n'
RUN = """
name = "s3"
out_dir = "{out}"
[model]
preset = "tiny"
vocab_size = 4032
max_position = 128
[objective]
kind = "rtd"
[data]
sources = [{{path = "{place}/web"}}]
heldout = "{place}/heldout"
tokenizer = "{tokenizer}"
seq_len = 128
workers = {workers}
cache = "{cache}"
[optim]
learning_rate = 1e-3
warmup_steps = 5
[train]
steps = 40
global_batch_size = 8
micro_batch_size = 8
log_every = 1
eval_sequences = 16
eval_every = 20
save_every = 40
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="directory of .txt files")
    parser.add_argument("--against", nargs="+", required=True, help="evaluation files")
    parser.add_argument("--scratch", type=Path, required=True, help="empty directory to work in")
    args = parser.parse_args()
    shutil.rmtree(args.scratch, ignore_errors=True)
    args.scratch.mkdir(parents=True)
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
                   "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
                   "DS_ACCELERATOR": "cpu"}
    port = free_port()
    server = subprocess.Popen(["moto_server", "-p", str(port)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_server(port)
        report = pipeline(args, Proxy(port), port)
    finally:
        server.kill()
        server.wait()
    out = ROOT / "benchmarks" / "results" / "data_s3.json"
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def pipeline(args, proxy: "Proxy", port: int) -> dict:
    from pyarrow.fs import LocalFileSystem, S3FileSystem, copy_files

    planted = raw_text(args, args.scratch / "raw")
    store = S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http",
                         allow_bucket_creation=True)
    store.create_dir("shop/raw")
    copy_files(str(args.scratch / "raw"), "shop/raw", source_filesystem=LocalFileSystem(),
               destination_filesystem=store)
    (args.scratch / "filters.toml").write_text(FILTERS)
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{proxy.port}"
    report: dict = {"planted": planted, "commands": []}
    for place in ("s3://shop", str(args.scratch)):
        prepare(args, place, report["commands"] if "://" in place else None)
    proxy.corrupts = True
    report["faults while the corpus was made"] = proxy.report()
    manifests = {place: json.loads(read(place, "web/manifest.json"))
                 for place in ("s3://shop", str(args.scratch))}
    report["documents"] = manifests["s3://shop"]["counts"]
    report["same corpora as from local files"] = all(
        read("s3://shop", name) == read(str(args.scratch), name)
        for part in ("web", "heldout") for name in (f"{part}/manifest.json",
                                                    f"{part}/rows-128/manifest.json"))
    losses = {}
    for place, workers in (("s3://shop", 1), (str(args.scratch), 0)):
        losses[place], share = train(args, place, workers)
        if "://" in place:
            report["share of the corpus on this host when step 1 ended, and at the end"] = share
    report["faults with the run"] = proxy.report()
    report["steps"] = len(losses["s3://shop"])
    report["same losses as from local files"] = len(set(map(tuple, losses.values()))) == 1
    report["last loss"] = losses["s3://shop"][-1]
    return report


def raw_text(args, directory: Path) -> dict[str, int]:
    """Write chapters of novels with planted faults as 8 compressed files; return what was planted.
    """
    generator = random.Random(0)
    text = "".join(p.read_text("utf-8") for p in sorted(args.text.rglob("*.txt"))[:30])
    chapters = [part for part in re.split(r"(?m)^(?=CHAPTER|Chapter)", text) if len(part) > 2000]
    chapters = [chapter[:8000] for chapter in chapters]
    near = []
    for chapter in generator.sample(chapters, 50):
        words = chapter.split(" ")
        for place in generator.sample(range(len(words)), len(words) // 100):
            words[place] = "changed"
        near.append(" ".join(words))
    example = next(iter_texts(args.against))
    contaminated = [f"{chapter[:4000]} {example} {chapter[4000:6000]}"
                    for chapter in generator.sample(chapters, 20)]
    junk = ["menu | home | contact\n" * 40 for _ in range(30)]
    exact = generator.sample(chapters, 40)
    documents = [*chapters, *near, *contaminated, *junk, *exact]
    directory.mkdir()
    for number in range(8):
        lines = [json.dumps({"text": text, "id": f"{number}-{index}"}) + "\n"
                 for index, text in enumerate(documents[number::8])]
        (directory / f"{number}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), 1,
                                                                     mtime=0))
    return {"documents": len(documents), "exact copies": len(exact), "near copies": len(near),
            "with an evaluation example": len(contaminated), "junk": len(junk)}


def iter_texts(paths: list[str]):
    for path in paths:
        for line in Path(path).read_text("utf-8").splitlines():
            for value in json.loads(line).values():
                if isinstance(value, str) and 20 < len(value.split()) < 80:
                    yield value


def prepare(args, place: str, commands: list | None) -> None:
    """Run all the commands of the preparation with inputs and outputs at `place`."""
    raw, read = f"{place}/raw/*.jsonl.gz", ["--id_key", "id", "--cache", str(args.scratch / "c")]
    tokenizer, workers = ["--tokenizer", f"{place}/spm.model"], ["--workers", "2"]
    cache = ["--cache", str(args.scratch / "c")]
    filters = ["--filters", str(args.scratch / "filters.toml")]
    for command in (
        ["train_tokenizer.py", raw, *read, "--vocab_size", "4000", "--sample_bytes", "4000000",
         "--out", f"{place}/spm.model"],
        ["dedup.py", raw, *read, "--near", "0.8", "--out", f"{place}/found", *workers],
        ["decontaminate.py", raw, *read, "--against", *args.against, "--out",
         f"{place}/contaminated", *workers],
        ["filter.py", raw, *read, *filters, "--out", f"{place}/look", *workers],
        ["tokenize_corpus.py", raw, *read, *tokenizer, *filters, "--leave_out", f"{place}/found",
         f"{place}/contaminated", "--heldout_out", f"{place}/heldout", "--heldout_share", "0.05",
         "--out", f"{place}/web", *workers],
        ["pack.py", f"{place}/web", f"{place}/heldout", *cache, *tokenizer, "--seq_len", "128",
         *workers],
    ):
        start = time.perf_counter()
        done = run([sys.executable, f"{PREP}/{command[0]}", *command[1:]])
        said = done.stdout.strip().splitlines()[-1].replace(str(args.scratch), "DIR")
        if commands is not None:
            known = ["/".join(Path(word).parts[-2:]) if word in args.against else word
                     for word in command]
            line = " ".join(known).replace(str(args.scratch), "DIR")
            commands.append({"command": line, "said": said,
                             "seconds": round(time.perf_counter() - start, 1)})
        print(f"{command[0]}: {said}", flush=True)


def train(args, place: str, workers: int) -> tuple[list[float], list[float]]:
    """Return the losses of a run on the corpora at `place`, and the shares of them in its cache."""
    name = "remote" if "://" in place else "local"
    out, cache = args.scratch / f"run_{name}", args.scratch / f"rows_{name}"
    config = args.scratch / f"{name}.toml"
    config.write_text(RUN.format(out=out, place=place, tokenizer=args.scratch / "spm.model",
                                 cache=cache, workers=workers))
    process = subprocess.Popen([sys.executable, "launch/pretrain.py", "--config", str(config),
                                "--deepspeed_config", "ds_configs/zero1_fp32.json"],
                               cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
                               stdout=open(args.scratch / f"{name}.log", "wb"),
                               stderr=subprocess.STDOUT)
    total = sum(p.stat().st_size for p in (args.scratch / "web").rglob("*.npy"))
    first = 0.0
    while process.poll() is None:
        if not first and losses_of(out):
            first = present(cache) / total
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit((args.scratch / f"{name}.log").read_text()[-4000:])
    return losses_of(out), [round(first, 3), round(present(cache) / total, 3)]


def present(cache: Path) -> int:
    return sum(512 * p.stat().st_blocks for p in cache.rglob("*.npy"))


def losses_of(out: Path) -> list[float]:
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    records = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if record["kind"] == "train"]


def read(place: str, name: str) -> bytes:
    from deberta_ds.files.remote import file_system

    system, root = file_system(place)
    return system.cat_file(f"{root}/{name}")


def run(command: list[str]) -> subprocess.CompletedProcess:
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done


class Proxy:
    """Passes connections on, with faults. Attributes: port, corrupts."""

    def __init__(self, server_port: int):
        self._server, self.corrupts = server_port, False
        self._counts = dict.fromkeys(("connections", "cut", "delayed", "bits flipped"), 0)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        threading.Thread(target=self._listen, args=(listener,), daemon=True).start()

    def report(self) -> dict[str, int]:
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return counts

    def _listen(self, listener: socket.socket) -> None:
        for number in count():
            client = listener.accept()[0]
            server = socket.create_connection(("127.0.0.1", self._server))
            self._counts["connections"] += 1
            threading.Thread(target=self._copy, args=(client, server, -1), daemon=True).start()
            threading.Thread(target=self._copy, args=(server, client, number), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, number: int) -> None:
        """Pass bytes on; answers of connection `number` (-1: requests) with its faults."""
        passed, room = 0, 30_000 if number >= 0 and number % 5 == 4 else 1 << 60
        try:
            while passed < room and (data := source.recv(min(room - passed, 1 << 16))):
                if number >= 0 and number % 3 == 2:
                    self._counts["delayed"] += 1
                    time.sleep(0.05)
                if self.corrupts and number >= 0 and number % 7 == 6 and len(data) > 20_000:
                    self._counts["bits flipped"] += 1
                    data = data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]
                target.sendall(data)
                passed += len(data)
            self._counts["cut"] += passed >= room
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


if __name__ == "__main__":
    main()
