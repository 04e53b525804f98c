"""The small pictures of a page."""

from PIL import Image

from retrieval import DmlError
from retrieval.reporting import thumbs
from tests.retrieval.made import file, names
from tests.retrieval.reporting.views import noise, view_of


def test_thumbnails_are_small_shared_and_within_the_budget(tmp_path):
    import base64
    import io

    paths = [f"{n % 40}.jpg" for n in range(80)]
    made = thumbs.thumbnails(paths, noise)
    assert len(made.images) == len(made.of) == 40
    assert max(made.of.values()) == 39
    data = base64.b64decode(made.images[0].partition(",")[2])
    assert Image.open(io.BytesIO(data)).size == (64, 48)
    less = thumbs.thumbnails(paths, noise, budget=sum(map(len, made.images[:10])))
    assert less.images == made.images[:10]
    assert set(less.of) == {f"{n}.jpg" for n in range(10)}
    same = thumbs.thumbnails(["1.jpg", "2.jpg"], lambda _: noise("1.jpg"))
    assert (len(same.images), same.of) == (1, {"1.jpg": 0, "2.jpg": 0})


def test_unreadable_images_are_counted_not_fatal(clustered):
    def some(path):
        if path.startswith("00"):
            raise DmlError(f"{path} cannot be read as an image.", "There is no such file.")
        return None if path.startswith("01") else noise(path)

    view = view_of(file(*clustered, names(60)), pictures=some)
    [warning] = view["warnings"]
    assert "20 of 60" in warning
    assert warning.endswith(".jpg: there is no such image") or "cannot be read" in warning
    for path, thumb in zip(view["items"]["path"], view["items"]["thumb"], strict=True):
        assert (thumb == -1) == path.startswith(("00", "01"))
