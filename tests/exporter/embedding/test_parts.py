"""Several processes embed images into one file: the bytes of one process, also after kills.

The file is also the script of those processes: `python test_parts.py FOLDER OPTIONS`.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from exporter.embedding import parts, writing
from exporter.embedding.engine import Engine
from exporter.embedding.writing import EmbedSettings
from retrieval.distributed import processes
from retrieval.distributed.world import ALONE
from retrieval.errors import DmlError
from retrieval.formats.shard_sets import shard_of
from retrieval.loading.load import load
from tests.commands import call
from tests.exporter.embedding.toy import ATTRS, PREPARED, D, draw, quarters, without_time
from tests.ranks import finish, run_commands, slurm_variables, start, together
from trainer.data.datasets.records import build

N = 100


def images_of(folder):
    rows = json.loads((folder / "rows.json").read_text())
    return build("toy", folder, [tuple(row) for row in rows])


def embed(folder, target, world=ALONE, kill=(), count=N, model="", **options):
    """Embed `count` images of a folder; kill: [rank, batches that it still computes]."""
    data = images_of(folder)
    left = [kill[1] if kill and world.rank == kill[0] else 10**9]

    def run(images):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return quarters(images)

    splits = {"query": np.arange(0, N, 2), "gallery": np.arange(1, count, 2)}
    settings = EmbedSettings(batch_size=4, **options)
    engine = Engine(run, D, PREPARED, ATTRS | ({"model_sha256": model} if model else {}))
    given = {"workers": 1, "world": world, "patience": 0.5}
    return writing.embed(engine, data, splits, target, settings, **given)


def main(folder, options):
    """The second rank has options of its own in `other`."""
    other = options.pop("other", {})
    with processes.joined() as world:
        options |= other if world.rank == 1 else {}
        print(embed(folder, folder / options.pop("target"), world, **options).computed)


def in_ranks(size, folder, **options):
    return together(size, __file__, folder, json.dumps(options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images, and the file that one process makes of them."""
    folder = tmp_path_factory.mktemp("images")
    data = draw(folder, N)
    labels = [data.label_names[n] for n in data.labels]
    rows = list(zip(data.paths, labels, ["query", "gallery"] * (N // 2), strict=True))
    (folder / "rows.json").write_text(json.dumps(rows))
    embed(folder, folder / "one.h5")
    return folder


def test_runs_of_two_three_and_one_process_that_are_killed_give_the_file_of_one(folder):
    target = folder / "killed.h5"
    two = in_ranks(2, folder, target=target.name, kill=[1, 3])
    assert [rank.code for rank in two] == [1, -signal.SIGKILL]
    left = target.with_name("killed.h5.part-1")
    assert left.stat().st_size > 32
    with left.open("ab") as file:
        file.write(b"a batch that was cut short")
    three = in_ranks(3, folder, target=target.name, resume=True, kill=[0, 2])
    assert [rank.code for rank in three] == [-signal.SIGKILL, 1, 1]
    done = embed(folder, target, resume=True)
    assert 0 < done.computed < N - 3 * 4
    assert without_time(target) == without_time(folder / "one.h5")
    assert not list(folder.glob("killed.h5.*"))


def test_three_processes_write_the_file_of_one(folder):
    ranks = in_ranks(3, folder, target="three.h5")
    assert [rank.code for rank in ranks] == [0, 0, 0]
    assert ranks[0].stdout == f"{N}\n"  # no image was embedded twice
    assert without_time(folder / "three.h5") == without_time(folder / "one.h5")
    again = in_ranks(3, folder, target="three.h5", resume=True)  # there is nothing left to do
    assert [rank.code for rank in again] == [0, 0, 0]


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"count": N - 2}, "Rank 1 has a list of 99 images; that of rank 0 has 100."),
        ({"model": "other"}, "The processes have different models."),
        ({"target": "there/x.h5"}, "Rank 1 does not see the file that rank 0 writes, x.h5."),
    ],
)
def test_ranks_that_would_write_different_files_end_at_once(other, error, folder):
    (folder / "there").mkdir(exist_ok=True)
    before = sorted(folder.glob("**/*"))
    ranks = in_ranks(2, folder, target="x.h5", other=other)
    assert [rank.code for rank in ranks] == [1, 1]
    told = "".join(rank.stderr for rank in ranks)
    assert told.count(error) == 1
    assert "Traceback" not in told
    left = set(folder.glob("**/*")) - set(before)
    assert {path.name.partition(".h5")[2][:6] for path in left} <= {".parti", ".part-"}
    embed(folder, folder / "x.h5", resume=True)
    assert without_time(folder / "x.h5") == without_time(folder / "one.h5")
    (folder / "x.h5").unlink()
    assert sorted(folder.glob("**/*")) == before
    (folder / "there").rmdir()


def test_rows_of_a_rank_whose_disk_is_full_name_the_file(folder, tmp_path):
    data = images_of(folder)
    out = writing._writer(
        Engine(quarters, D, PREPARED, ATTRS),
        data,
        {"query": np.arange(0, N, 2)},
        tmp_path / "x.h5",
        EmbedSettings(),
    )
    with pytest.raises(DmlError, match=r"x\.h5\.part-1 could not be written: the disk is full"):
        parts.PartFile(out, 1, 1 << 50)


def test_bad_images_of_all_ranks_are_left_out_as_by_one(folder, tmp_path):
    rows = json.loads((folder / "rows.json").read_text())
    for n, (path, *_) in enumerate(rows):
        good = n not in (3, 8, 40, 41, 77)
        (tmp_path / path).write_bytes((folder / path).read_bytes() if good else b"no image")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    options = {"skip_bad": True, "half": True}
    one = embed(tmp_path, tmp_path / "one.h5", **options)
    assert len(one.skipped) == 5
    two = in_ranks(2, tmp_path, target="two.h5", **options)
    assert [rank.code for rank in two] == [0, 0], two
    assert without_time(tmp_path / "two.h5") == without_time(tmp_path / "one.h5")
    failed = in_ranks(2, tmp_path, target="three.h5")
    assert [rank.code for rank in failed] == [1, 1]
    assert sum("The rows computed so far are kept" in rank.stderr for rank in failed) == 1


def test_part_files_of_another_model_are_not_used(folder):
    out = writing._writer(
        Engine(quarters, D, PREPARED, ATTRS | {"model_sha256": "other"}),
        images_of(folder),
        {"query": np.arange(0, N, 2), "gallery": np.arange(1, N, 2)},
        folder / "other.h5",
        EmbedSettings(),
    )
    part = parts.PartFile(out, 1, 4)
    part.write("query", np.arange(4), np.zeros((4, D), np.float32))
    part.close()
    assert len(list(parts.batches(part.path, out))) == 1
    done = embed(folder, folder / "other.h5", resume=True)
    assert done.computed == N
    assert not part.path.exists()


def test_a_batch_that_a_disk_has_kept_only_in_part_is_not_read(folder, tmp_path):
    out = writing._writer(
        Engine(quarters, D, PREPARED, ATTRS),
        images_of(folder),
        {"test": np.arange(N)},
        tmp_path / "x.h5",
        EmbedSettings(),
    )
    part = parts.PartFile(out, 1, 8)
    for first in (0, 4):
        part.write("test", np.arange(first, first + 4), np.ones((4, D), np.float32))
    part.close()
    with part.path.open("r+b") as file:  # zeros, as after a power failure
        file.seek(-4, os.SEEK_END)
        file.write(bytes(4))
    (batch,) = parts.batches(part.path, out)
    assert batch[1].tolist() == [0, 1, 2, 3]


def test_shards_together_hold_the_rows_of_one_file(folder, tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for k in (1, 2, 3):
        embed(folder, shards / f"part-{k}.h5", shard=(k, 3))
    whole, found = load(folder / "one.h5"), load(shards)
    for split in ("query", "gallery"):
        for name in ("vectors", "labels", "paths"):
            a, b = (getattr(each.splits[split], name) for each in (whole, found))
            assert np.array_equal(a, b), (split, name)
    with pytest.raises(DmlError, match="no shard 4/3"):
        embed(folder, tmp_path / "x.h5", shard=(4, 3))
    for k in (1, 900):  # also for the last one, which would have images
        with pytest.raises(DmlError, match="900 shards cannot be made: there are 13 batches"):
            embed(folder, tmp_path / "x.h5", shard=(k, 900))
    with pytest.raises(DmlError, match="no shard 2/1"):
        embed(folder, tmp_path / "x.h5", shard=(2, 1))


def test_shards_know_the_set_that_they_belong_to(folder, tmp_path):
    for k in (1, 2, 3):
        embed(folder, tmp_path / f"part-{k}.h5", shard=(k, 3))
    found = [shard_of(load(tmp_path / f"part-{k}.h5").attrs) for k in (1, 2, 3)]
    assert [(shard.number, shard.of, shard.rows) for shard in found] == [
        (k, 3, N) for k in (1, 2, 3)
    ]
    assert len({shard.whole for shard in found}) == 1
    assert shard_of(load(folder / "one.h5").attrs) is None
    assert embed(folder, tmp_path / "part-1.h5", shard=(1, 3), resume=True).computed == 0
    # A shard of a list without the last image has the same rows, and is not of this set.
    with pytest.raises(DmlError, match="exists"):
        embed(folder, tmp_path / "part-1.h5", count=N - 2, shard=(1, 3), resume=True)
    embed(folder, tmp_path / "part-1.h5", count=N - 2, shard=(1, 3), force=True)
    with pytest.raises(DmlError, match="lists of images differ, of 99 and of 100 images"):
        load(tmp_path)


def test_shards_of_images_with_other_labels_are_of_another_set(folder):
    rows = [tuple(row) for row in json.loads((folder / "rows.json").read_text())]
    *rows, (_, other, _), (path, label, split) = rows
    settings = EmbedSettings(shard=(1, 2))
    found = []
    for last, order in ((label, 1), (other, 1), (label, -1)):
        data = build("toy", folder, [*rows, (path, last, split)])
        listed = {"test": np.arange(len(data))[::order]}
        found.append(writing._part_of(data, listed, settings).list_sha256)
    assert len(set(found)) == 3


def test_shards_without_unreadable_images_are_a_whole_set(folder, tmp_path):
    images, shards = tmp_path / "images", tmp_path / "shards"
    for path in (images, shards):
        path.mkdir()
    rows = json.loads((folder / "rows.json").read_text())
    for n, (path, *_) in enumerate(rows):
        (images / path).write_bytes(b"no image" if n == 3 else (folder / path).read_bytes())
    (images / "rows.json").write_text(json.dumps(rows))
    for k in (1, 2):
        embed(images, shards / f"{k}.h5", shard=(k, 2), skip_bad=True)
    assert sum(len(split.vectors) for split in load(shards).splits.values()) == N - 1


def test_the_command_in_two_processes_writes_and_prints_what_one_does(exported, folder, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for path in sorted(folder.glob("*.png")):
        (images / path.name).write_bytes(path.read_bytes())
    command = ["embed", exported, images, "--provider", "cpu", "--threads", 1, "--batch-size", 5]
    one = call(*command, "--out", tmp_path / "one.h5")
    ((first, second),) = run_commands(2, [[*command, "--out", tmp_path / "two.h5"]], tmp_path)
    assert (first.code, second.code, second.stdout) == (one.exit_code, 0, "") == (0, 0, "")
    assert without_time(tmp_path / "one.h5") == without_time(tmp_path / "two.h5")
    assert first.stdout.replace("two.h5", "one.h5") == one.stdout
    command = ["-m", "cli", *command, "--out", tmp_path / "slurm.h5"]
    first, second = finish(start(2, *command, variables=slurm_variables))
    assert (first.code, second.code, second.stdout) == (0, 0, ""), first.stderr + second.stderr
    assert without_time(tmp_path / "one.h5") == without_time(tmp_path / "slurm.h5")


def test_the_next_step_of_a_shard_is_to_evaluate_all(exported, folder, tmp_path, monkeypatch):
    command = ["embed", exported, folder, "--out", tmp_path / "1.h5", "--provider", "cpu"]
    done = call(*command, "--threads", 1, "--shard", "1/2")
    assert f"Collect all 2 shards in one folder, such as {tmp_path}." in done.stderr
    assert f"Next: dmltool eval {tmp_path} --labels" in done.stderr
    monkeypatch.chdir(tmp_path)
    command[command.index("--out") + 1] = "2.h5"
    done = call(*command, "--threads", 1, "--shard", "2/2")
    assert "Collect all 2 shards in one folder, such as shards." in done.stderr
    assert "Next: dmltool eval shards --labels" in done.stderr


INTERRUPTED = """
import os, signal, time
from cli import main
from exporter.embedding.writing import Work
from retrieval import signals

add, done = Work.add, []

def slowly(*given):
    add(*given)
    done.append(given)
    time.sleep(0.05)
    if os.environ["RANK"] == "1" and len(done) == 3:
        os.kill(os.getpid(), signal.SIGINT)

Work.add = slowly
signals.end_on_interrupt("__main__")
main()
"""


def test_ctrl_c_that_one_rank_gets_ends_all_and_says_how_to_continue(exported, folder, tmp_path):
    command = ["embed", exported, folder, "--out", tmp_path / "x.h5", "--batch-size", 4]
    first, second = together(2, "-c", INTERRUPTED, *command, "--provider", "cpu", "--threads", 1)
    assert (first.code, second.code) == (130, 130), first.stderr + second.stderr
    assert "Interrupted: add --resume to continue." in first.stderr
    assert second.stderr == ""
    assert call(*command, "--resume").exit_code == 0


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except DmlError as error:
        sys.exit(f"Error: {error}")
