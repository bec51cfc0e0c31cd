"""The report on a machine names what a run depends on, and what would stop it."""

from deberta_ds.base.errors import UserError
from deberta_ds.training import doctor


def test_the_report_of_this_machine(process_group, capsys):
    assert doctor.examine() == []
    text = capsys.readouterr().out
    for words in ("packages: torch ", "cores", "TRITON_CACHE_DIR: /", "TFLOP/s", "GB/s",
                  "kernels: attention tiled", "one layer of base, 4 x 128", "would stop a run"):
        assert words in text, text


def test_a_kernel_that_fails_is_a_problem(process_group, capsys, monkeypatch):
    def fail(*_arguments, **_more):
        raise UserError("a kernel fails its check; --model.attention=dense")

    monkeypatch.setattr(doctor.kernel_table, "choices", fail)
    assert doctor.examine() == ["a kernel fails its check; --model.attention=dense"]
    assert "PROBLEM: a kernel fails its check" in capsys.readouterr().out
