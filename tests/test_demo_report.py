"""The demo writes a report with one option."""

from __future__ import annotations

import re

import pytest

from funcpipe.__main__ import main


def test_the_demo_writes_its_report(tmp_path, capsys):
    """One epoch; the page has the last step's timelines, its four stages and all their
    parameters."""
    pytest.importorskip("sklearn")
    file = tmp_path / "report.html"
    assert 0 == main(["demo", "--epochs", "1", "--microbatches", "4", "--report", str(file)])
    printed = capsys.readouterr().out
    assert f"report of the last step written to {file}" in printed
    page = file.read_text(encoding="utf-8")
    assert "<h1>digits</h1>" in page
    assert 3 == page.count("<svg")
    stages = re.search(r"<h2>Stages</h2>.*?</table>", page, re.S)[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in stages.split("<tr>")[2:]]
    assert ["0", "1", "2", "3"] == [row[0] for row in rows]
    total = sum(int(row[3].replace(",", "")) for row in rows)
    assert f" {total} parameters" in printed


def test_without_the_option_no_report_is_made(tmp_path, monkeypatch):
    """Nothing is written."""
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    assert 0 == main(
        ["demo", "--epochs", "1", "--stages", "2", "--microbatches", "2", "--batch", "700"]
    )
    assert [] == list(tmp_path.iterdir())
