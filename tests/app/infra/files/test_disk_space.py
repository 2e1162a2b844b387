"""Room on disks: writers keep a reserve, and the embedded database has one of its own."""

import errno
from pathlib import Path

import pytest

from app.infra.files.disk_space import DatabaseReserve, DiskReserve, DiskReserveReached, free_bytes
from tests.small_disk import fill, small_disk

_MIB = 2**20


@pytest.mark.needs("small disk")
class TestDatabaseReserve:
    def test_reserve_is_released_on_a_full_disk_and_taken_again_later(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "home", 256 * _MIB) as home:
            (home / "postgres").mkdir()
            reserve = DatabaseReserve(home)
            assert reserve.adjust_reserve() is None
            assert (free_bytes(home) or 0) <= (256 - 64) * _MIB and reserve.describe_shortage() is None
            filler = fill(home, free=50 * _MIB)
            assert reserve.adjust_reserve() is None, "it is given back only where it is needed"
            assert "50 MiB free" in (reserve.describe_shortage() or "")
            filler.unlink()
            filler = fill(home, free=_MIB)
            assert "are given back" in (reserve.adjust_reserve() or "")
            assert (free_bytes(home) or 0) >= 64 * _MIB
            assert reserve.describe_shortage(), "what is given back is no room for others"
            assert DatabaseReserve(home).describe_shortage(), "nor for another process that looks"
            assert reserve.adjust_reserve() is None
            filler.unlink()
            assert "has room again" in (reserve.adjust_reserve() or "")
            assert reserve.describe_shortage() is None and (home / "postgres" / "reserve").stat().st_size == 64 * _MIB

    def test_reserve_is_not_taken_on_a_disk_without_room(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "home", 100 * _MIB) as home:
            (home / "postgres").mkdir()
            reserve = DatabaseReserve(home)
            assert reserve.adjust_reserve() is None
            assert not (home / "postgres" / "reserve").exists()
            assert reserve.describe_shortage()


@pytest.mark.needs("small disk")
def test_without_inodes_nothing_more_is_stored_however_many_bytes_are_free(tmp_path: Path) -> None:
    with small_disk(tmp_path / "home", 256 * _MIB, inodes=1200) as home:
        (home / "postgres").mkdir()
        DiskReserve(home, 0).ensure_room(0)
        assert DatabaseReserve(home).describe_shortage() is None
        for number in range(300):
            (home / str(number)).touch()
        with pytest.raises(DiskReserveReached, match="inodes free"):
            DiskReserve(home, 0).ensure_room(0)
        assert "inodes free" in (DatabaseReserve(home).describe_shortage() or "")


def test_only_the_embedded_database_of_this_home_has_a_reserve(tmp_path: Path) -> None:
    assert DatabaseReserve.for_home(tmp_path, "postgresql://a/b") is None
    (tmp_path / "embedded.json").write_text('{"database_url": "postgresql://own"}')
    assert DatabaseReserve.for_home(tmp_path, "postgresql://a/b") is None
    assert DatabaseReserve.for_home(tmp_path, "postgresql://own") is not None


def test_a_write_that_would_use_the_reserve_is_refused_in_a_sentence(tmp_path: Path) -> None:
    DiskReserve(tmp_path, 0).ensure_room(0)
    with pytest.raises(DiskReserveReached, match=r"ANNEAL_DISK_RESERVE_BYTES.*delete runs or datasets") as refused:
        DiskReserve(tmp_path, 2**60).ensure_room(0)
    assert refused.value.errno == errno.ENOSPC
