"""`trivium cost params`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trivium.cli.cost import app

FIXTURE = Path(__file__).parent.parent / "fixtures" / "k3-tiny-a"


def run(*arguments):
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["params", *arguments], catch_exceptions=False)


def test_a_preset_is_printed_by_component_beside_the_published_figures():
    result = run("k3")
    assert result.exit_code == 0
    for text in ("routed experts", "2,779,931,837,184", "104,189,612,640", "2.78T", "104.2B", "2,208 zeros"):
        assert text in result.stdout


@pytest.mark.parametrize("path", [FIXTURE, FIXTURE / "config.json"])
def test_json_of_a_folder_and_of_a_config_file(path):
    content = json.loads(run(str(path), "--json").stdout)
    assert content["total"] == sum(row["total"] for row in content["components"].values())
    assert content["active"] == sum(row["active"] for row in content["components"].values())
    assert content["components"]["embedding"] == {"total": 320 * 64, "active": 0}
    assert content["components"]["routed experts"] == {"total": 8 * 16 * 3 * 32 * 32, "active": 8 * 4 * 3 * 32 * 32}
    assert content["padding"] == 6 * 126
    assert content["published"] is None


def test_what_is_neither_a_preset_nor_a_path_is_refused():
    with pytest.raises(
        ValueError, match="^model: wanted one of k3, k2, nano, micro, mini, bench, bench-xl, or a config file or folder"
    ):
        run("k4")
