"""A cache and a server, as the tests of `remote` have them."""

from tests.retrieval.remote.conftest import downloads as downloads
from tests.retrieval.remote.conftest import folder as folder
from tests.retrieval.remote.conftest import server as server
