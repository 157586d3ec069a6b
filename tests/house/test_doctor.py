import pytest

from labkit import doctor
from labkit.kernels import address_spaces


def find(findings, what):
    return next(finding for finding in findings if finding.what == what)


def test_every_look_reports_something_true():
    findings = doctor.examine()
    assert find(findings, "python").status == "ok"
    assert find(findings, "mlx device").status == "ok"
    assert doctor.as_record(findings)["versions"]["mlx"]


def test_whatever_is_not_ok_says_what_to_do():
    for finding in doctor.examine():
        assert (finding.status == "ok") or finding.remedy, finding


def test_no_compiler_anywhere_is_found_and_named(monkeypatch):
    monkeypatch.delenv("LABKIT_CXX", raising=False)
    address_spaces.find_clang.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.which", lambda name: None)
        patch.setattr("importlib.util.find_spec", lambda name: None)
        findings = doctor.examine()
    address_spaces.find_clang.cache_clear()
    for what in ("C++ compiler", "clang (address spaces)"):
        finding = find(findings, what)
        assert finding.status == "missing"
        assert "pip install ziglang" in finding.remedy


def test_a_named_compiler_is_the_one_that_is_found(monkeypatch):
    monkeypatch.setenv("LABKIT_CXX", "my-c++ -v")
    assert find(doctor.examine(), "C++ compiler").detail == "my-c++ -v"


def test_a_missing_model_makes_the_machine_unhealthy(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.resources, "data_folder", lambda: tmp_path)
    findings = doctor.examine()
    assert find(findings, "embedded model").status == "missing"
    assert not doctor.healthy(findings)


def test_a_model_that_is_only_a_pointer_is_broken(monkeypatch, tmp_path):
    (tmp_path / "models" / "tiny-hybrid").mkdir(parents=True)
    (tmp_path / "models" / "tiny-hybrid" / "model.safetensors").write_text("version https://git-lfs")
    monkeypatch.setattr(doctor.resources, "data_folder", lambda: tmp_path)
    assert find(doctor.examine(), "embedded model").status == "broken"


def test_a_look_that_raises_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "_device", lambda: 1 / 0)
    finding = find(doctor.examine(), "mlx device")
    assert finding.status == "broken"
    assert "ZeroDivisionError" in finding.detail
    assert not doctor.healthy([finding])


@pytest.mark.parametrize("present", [True, False])
def test_a_named_browser_must_exist(monkeypatch, tmp_path, present):
    browser = tmp_path / "browser"
    if present:
        browser.write_text("")
    monkeypatch.setenv("LABKIT_BROWSER", str(browser))
    assert doctor.find_browser() == (str(browser) if present else None)
