"""Options about who, where and how much: what they mean, and one sentence when they mean nothing."""

from __future__ import annotations

import pytest

from afire.errors import UserError
from afire.pacs.connections import (
    Destination,
    is_loopback,
    parse_caller,
    parse_destination,
    parse_size,
    parse_title,
    plain_address,
    read_password,
    require_secure,
    server_context,
)


def test_callers() -> None:
    caller = parse_caller("ORTHANC@127.0.0.1")
    assert caller.title == "ORTHANC" and caller.addresses == {"127.0.0.1"}
    assert parse_caller("A@B@[::1]").title == "A@B" and "::1" in parse_caller("A@::1").addresses


@pytest.mark.parametrize("text", ["ORTHANC", "@127.0.0.1", "ORTHANC@", "A\\B@127.0.0.1", "seventeen letters@127.0.0.1"])
def test_no_callers(text: str) -> None:
    with pytest.raises(UserError, match="--allow"):
        parse_caller(text)


def test_destinations() -> None:
    web = parse_destination("dicomweb:http://127.0.0.1:8042/dicom-web/")
    assert web == Destination("dicomweb", "127.0.0.1", 8042, False, url="http://127.0.0.1:8042/dicom-web")
    assert parse_destination("dicomweb:https://pacs.example/dicom-web").port == 443
    assert parse_destination("dimse:PACS@127.0.0.1:4242") == Destination("dimse", "127.0.0.1", 4242, False, "PACS")
    assert parse_destination("dimse+tls:PACS@[::1]:2762") == Destination("dimse", "::1", 2762, True, "PACS")
    assert "PACS@127.0.0.1:4242" in parse_destination("dimse:PACS@127.0.0.1:4242").words


@pytest.mark.parametrize(
    "text",
    ["http://127.0.0.1", "dicomweb:ftp://x", "dicomweb:127.0.0.1", "dimse:PACS@127.0.0.1", "dimse:127.0.0.1:4242",
     "dimse:P@h:0", "dimse:P@h:99999", "", "dicomweb:http://user:secret@127.0.0.1/x"],
)  # fmt: skip
def test_no_destinations(text: str) -> None:
    with pytest.raises(UserError, match="--send") as caught:
        parse_destination(text)
    assert "secret" not in str(caught.value)


def test_sizes() -> None:
    sizes = {"5GB": 5 * 10**9, "500 MB": 5 * 10**8, "1.5g": 15 * 10**8, "12": 12, "0": 0, "2k": 2000}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "five", "5 PB", "-1GB"):
        with pytest.raises(UserError, match="--min-free"):
            parse_size(text)


def test_titles() -> None:
    assert parse_title(" AFIRE ", "--aet") == "AFIRE"
    for text in ("", "A" * 17, "Ä", "A\\B", "A\nB"):
        with pytest.raises(UserError, match="--aet"):
            parse_title(text, "--aet")


def test_what_leaves_this_machine_needs_tls_or_a_word() -> None:
    assert is_loopback("127.0.0.1", "--bind") and is_loopback("::1", "--bind") and not is_loopback("0.0.0.0", "--bind")
    require_secure("127.0.0.1", "--bind", is_tls=False)
    require_secure("0.0.0.0", "--bind", is_tls=True)
    with pytest.raises(UserError, match="--insecure"):
        require_secure("0.0.0.0", "--bind", is_tls=False)


def test_addresses_in_one_spelling() -> None:
    assert plain_address("::ffff:127.0.0.1") == "127.0.0.1" and plain_address("fe80::1%eth0") == "fe80::1"


def test_passwords_come_from_a_file_or_the_environment(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("AFIRE_SEND_PASSWORD", "from outside")
    (tmp_path / "password").write_text("s3cret \n")
    assert read_password(tmp_path / "password", "AFIRE_SEND_PASSWORD") == "s3cret "
    assert read_password(None, "AFIRE_SEND_PASSWORD") == "from outside" and read_password(None, "NOT_SET") == ""
    with pytest.raises(UserError, match="does not exist"):
        read_password(tmp_path / "none", "AFIRE_SEND_PASSWORD")


def test_a_ca_without_a_certificate_is_a_mistake(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="--tls-cert"):
        server_context(None, tmp_path / "ca.pem")
    assert server_context(None, None) is None
