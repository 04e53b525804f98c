"""The README's commands for several processes and machines do what one process does.

The lines are those of its section 'Outgrown one machine?'. Only what a test cannot have is
replaced: two processes for eight, this machine for two, and a free port.
"""

import shutil
import sys
from contextlib import chdir
from pathlib import Path

import onnx
import pytest

from tests.buckets import empty_bucket
from tests.commands import call
from tests.exporter.embedding.toy import without_time
from tests.exporter.models import PROPERTIES, mean_model
from tests.forks import Forked
from tests.pages import BLOCK, README, commands
from tests.ranks import finish, variables
from tests.trainer.small import draw_pictures

SECTION = README.read_text().partition("### Outgrown one machine?")[2]
TEXT = BLOCK.search(SECTION)[2]
EMBED, EVAL, SHARDS = (words for words, _ in commands(TEXT))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model, photos, and the embedding file that one process makes of them."""
    folder = tmp_path_factory.mktemp("outgrown")
    onnx.save(mean_model(properties=PROPERTIES), folder / "model.onnx")
    draw_pictures(folder / "photos", images=60)  # several tiles
    with chdir(folder):
        assert call("embed", "model.onnx", "photos", "--out", "one.h5").exit_code == 0
    return folder


@pytest.fixture
def place(made, monkeypatch):
    """That folder, to work in, without what other tests have left."""
    monkeypatch.chdir(made)
    yield made
    for path in (*made.glob("photos.h5"), *made.glob("part-*")):
        path.unlink()


def free_port():
    return variables(1)[0]["MASTER_PORT"]


def replaced(words, **new):
    """The words with new values of these options, all of which have to be there."""
    options = {f"--{name.replace('_', '-')}": value for name, value in new.items()}
    split = [word.partition("=") for word in words]
    assert options.keys() <= {name for name, _, _ in split}, words
    return [f"{name}{sign}{options.get(name, value)}" for name, sign, value in split]


def torchrun(words, place, **variables):
    """A real torchrun: its processes start anew and import torch themselves."""
    program, *arguments = words
    assert program == "torchrun"
    program = Path(sys.executable).with_name(program)
    return Forked(program, *arguments, env={"OMP_NUM_THREADS": "1", **variables}, cwd=place)


def test_embed_writes_the_file_of_one_process(place):
    port = {"PET_MASTER_PORT": free_port()}  # the default of --master-port
    code, told, errors = torchrun(replaced(EMBED, nproc_per_node=2), place, **port).end()
    assert code == 0, errors
    assert told.count("test     600") == 1  # by the first process
    assert without_time(place / "photos.h5") == without_time(place / "one.h5")


def test_eval_on_two_machines_prints_what_one_process_prints(place):
    """Two agents of torchrun, as if this machine were two."""
    shutil.copy("one.h5", "photos.h5")
    assert "# on the second machine: --node-rank=1" in TEXT
    here = {"nproc_per_node": 1, "master_addr": "127.0.0.1", "master_port": free_port()}
    agents = [torchrun(replaced(EVAL, node_rank=rank, **here), place) for rank in (0, 1)]
    first, second = finish(agents)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert (first.stdout, second.stdout) == (call("eval", "one.h5").stdout, "")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of boto
def test_eval_of_shards_in_a_bucket_prints_what_it_prints_of_one_file(place):
    assert "# shards of `embed --shard 1/8`" in TEXT
    embed = ("embed", "model.onnx", "photos")
    for k in (1, 2):
        assert call(*embed, "--out", f"part-{k}.h5", "--shard", f"{k}/2").exit_code == 0
    program, *words = SHARDS
    assert program == "dmltool"
    with empty_bucket() as bucket:
        for k in (1, 2):
            bucket.put(f"part-{k}.h5", f"bucket/shards/part-{k}.h5")
        code, told, errors = Forked("-m", "cli", *words, cwd=place).end()
    assert code == 0, errors
    assert told == call("eval", "one.h5").stdout
