"""Addresses in their parts, and without their secrets."""

import pytest

from retrieval.console import next_step
from retrieval.errors import DmlError
from retrieval.remote.address import parse, without_secrets


def test_addresses_in_all_their_parts():
    found = parse("https://me:secret@host.org/a/x.npy?token=abc::test/x")
    assert (found.key, found.name, found.shown) == ("test/x", "x.npy", "https://host.org/a/x.npy")
    assert not found.is_pattern
    found = parse("s3://bucket/a/part-?/x*.npy")
    assert found.is_pattern
    assert found.root == "s3://bucket/a"
    assert parse("http://[::1]:80/x.npy").key is None
    assert parse("http://[::1]:80").url == "http://[::1]:80"
    bucket = parse("s3://bucket::test")  # all files of a bucket
    assert (bucket.url, bucket.key) == ("s3://bucket", "test")
    assert parse("s3://bucket/x.npy::").url == "s3://bucket/x.npy"
    assert parse("s3:/bucket/x.npy").url == "s3://bucket/x.npy"  # of Path
    with pytest.raises(DmlError, match=r"file:///x\.npy cannot be opened"):
        parse("file:///x.npy")


def test_users_passwords_and_queries_are_left_out_whatever_signs_they_have():
    for password in ("secret", "sec/ret", "sec@ret", "sec:ret", "1234/ab"):
        text = f"cannot open postgresql://me:{password}@host/name?password={password} now"
        assert without_secrets(text) == "cannot open postgresql://host/name now"
    assert without_secrets("https://me:1234567/ab@host/x") == "https://host/x"
    assert without_secrets("'https://token@host/x.npy?sig=1'") == "'https://host/x.npy'"
    assert without_secrets("https://host/x?a=b::secret=1::key,y now") == "https://host/x::key,y now"
    assert without_secrets("https://host/x?a=[::1]&b=secret") == "https://host/x"
    paths = ("http://host:80/a@b", "http://[::1]:80/a@b", "hf://datasets/a@b")
    for text in ("http://host:80/x", "s3://b/part-?/x", *paths):
        assert without_secrets(text) == text


def test_the_next_step_names_no_secrets(capsys):
    next_step("report", "https://me:password@host/x.npz?token=1::key", "--labels", "y.txt")
    said = capsys.readouterr().err
    assert said == "Next: dmltool report https://host/x.npz::key --labels y.txt\n"


@pytest.mark.parametrize("text", ["s3://", "gs:///x.npy", "https://", "http:///x.npy::key"])
def test_an_address_without_a_bucket_or_server_is_named(text):
    place = "server" if text.startswith("http") else "bucket"
    with pytest.raises(DmlError, match=f"{text} names no {place}"):
        parse(text)
