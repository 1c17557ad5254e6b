"""Files that are written whole or not at all."""

import errno, os, threading

import pytest

from fastrl_replay.all import write_whole


def test_a_file_is_on_the_device_before_it_has_its_name_and_its_name_is_there_then(
    tmp_path, monkeypatch
):
    "Otherwise a power cut could leave an empty or older file after the call reported success"
    done, fsync, replace = [], os.fsync, os.replace

    def synced(file):
        done.append('folder' if os.path.isdir(f'/proc/self/fd/{file}') else 'file')
        fsync(file)

    monkeypatch.setattr(os, 'fsync', synced)
    monkeypatch.setattr(os, 'replace', lambda a, b: (done.append('name'), replace(a, b)))
    write_whole(tmp_path / 'a', b'new')
    assert done == ['file', 'name', 'folder']


@pytest.mark.parametrize(
    'code, told', [(errno.EINVAL, False), (errno.EACCES, False), (errno.EIO, True)]
)
def test_a_folder_that_cant_be_synced_is_no_error_and_a_broken_disk_is(
    tmp_path, monkeypatch, code, told
):
    "Windows and some network file systems"
    fsync = os.fsync

    def refuses(file):
        if os.path.isdir(f'/proc/self/fd/{file}'):
            raise OSError(code, 'no')
        fsync(file)

    monkeypatch.setattr(os, 'fsync', refuses)
    if told:
        with pytest.raises(OSError):
            write_whole(tmp_path / 'a', b'new')
    else:
        write_whole(tmp_path / 'a', b'new')
    assert [p.name for p in tmp_path.iterdir()] == ['a']


def test_threads_that_write_the_same_file_do_not_mix(tmp_path):
    "One of them is there, whole, and nothing is left over"
    parts = [bytes([i]) * 2**20 for i in range(4)]
    threads = [threading.Thread(target=write_whole, args=(tmp_path / 'a', part)) for part in parts]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (tmp_path / 'a').read_bytes() in parts and [p.name for p in tmp_path.iterdir()] == ['a']
