from pathlib import Path

import pytest

from labkit import devices, resources


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(devices.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_folder_is_made_under_the_named_root(own_cache):
    folder = devices.cache_folder("kernels")
    assert folder == own_cache / "kernels"
    assert folder.is_dir()


@pytest.mark.parametrize("kind", ["", ".", "..", "a/b", "/etc", ".hidden", "../up"])
def test_a_cache_kind_cannot_leave_the_root(own_cache, kind):
    with pytest.raises(ValueError, match="plain folder name"):
        devices.cache_folder(kind)


def test_a_cache_root_that_cannot_be_made_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(devices.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=devices.CACHE_VARIABLE):
        devices.cache_folder("kernels")


def test_xdg_cache_home_is_honoured_on_linux(monkeypatch, tmp_path):
    monkeypatch.delenv(devices.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(devices.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert devices.cache_root() == tmp_path / "labkit"


def test_macos_keeps_caches_in_library(monkeypatch):
    monkeypatch.delenv(devices.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(devices.sys, "platform", "darwin")
    assert devices.cache_root() == Path.home() / "Library" / "Caches" / "labkit"


def test_this_device_says_what_mlx_computes_on():
    import mlx.core as mx

    device = devices.this_device()
    assert (device.kind == "cpu") == (mx.default_device().type != mx.gpu)
    assert device.dtype == ("float32" if device.kind == "cpu" else "bfloat16")
    assert device.memory_bytes >= device.working_set_bytes > 1 << 28
    assert device.name


def test_data_folder_holds_the_embedded_model():
    assert (resources.data_folder() / "models" / "tiny-hybrid" / "config.json").is_file()
