"""The command line: frozen flags, exit codes, one clear line for a user's mistake."""

import subprocess
import sys
import types

import pytest

from paxlike import main as command
from paxlike import workdir
from paxlike.report import Report


def run(*args: str) -> int:
    return command.main(["paxlike", *args])


def only_line(captured) -> str:
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.fixture
def fake_mode(monkeypatch):
    """Put a function in the table of modes under the name `fake`."""

    def install(function):
        module = types.ModuleType("paxlike_fake_mode")
        module.function = function
        monkeypatch.setitem(sys.modules, "paxlike_fake_mode", module)
        monkeypatch.setitem(command.MODES, "fake", "paxlike_fake_mode:function")

    return install


def test_flags_are_frozen():
    """A new flag is a decision: other tools and documents rely on these names."""
    assert set(command.FLAGS) - {"flagfile", "undefok"} == {
        "experiment", "mode", "workdir", "override", "on_config_change", "target", "multihost",
        "coordinator", "num_processes", "process_id", "quick", "prompt", "profile_first_step",
        "profile_steps", "profile_dir", "step", "dump_hlo", "against", "list", "help",
    }  # fmt: skip


@pytest.mark.parametrize("flag", ["--help", "--list"])
def test_help_and_list_need_no_jax(flag):
    code = (
        "import sys; from paxlike.main import main; code = main(['paxlike', sys.argv[1]]);"
        "assert 'jax' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, flag], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("--experiment" if flag == "--help" else "quickstart") in done.stdout


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "paxlike.main", "--mode=trian", "--experiment=quickstart"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("paxlike: unknown mode 'trian'; did you mean train?")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "no experiment is named"),
        (("--experiment=quickstrat",), "did you mean quickstart?"),
        (("--experiment=quickstart", "--mode=serv"), "expected one of train, eval"),
        (("--expriment=quickstart",), "'expriment'. Did you mean: experiment"),
        (("–experiment=quickstart",), "U+2013"),
        (("experiment=quickstart",), "flags start with --"),
        (("--experiment=quickstart", "--override=model.num_layer=2"), "did you mean num_layers"),
        (("--experiment=quickstart", "--override=model.num_heads=3"), "multiple of the key/value"),
        (("--experiment=quickstart", "--num_processes=2", "--mode=fake"), "without --multihost"),
        (("--experiment=quickstart", "--prompt=x", "--mode=fake"), "--prompt has no effect"),
        (("--experiment=quickstart", "--target=v5e:4x4", "--mode=fake"), "target is 'v5e:4x4'"),
        (("--experiment=quickstart", "--on_config_change=ask"), "stop|take_new"),
    ],
)
def test_a_users_mistake_is_one_line_and_code_2(args, said, fake_mode, capsys, tmp_path):
    fake_mode(lambda experiment, directory: None)
    assert run(*args, f"--workdir={tmp_path}/new") == 2
    assert said in only_line(capsys.readouterr())
    assert not (tmp_path / "new").exists(), "a mistake leaves nothing behind"


def report(experiment, directory, **options) -> Report:
    return Report(
        experiment=experiment.name, mode="fake", target="cpu:8", results={"given": str(options)}
    )


def test_a_mode_gets_the_options_that_were_given(fake_mode, tmp_path):
    def mode(experiment, directory, *, quick=False, prompt=None, target=None):
        assert experiment.model.num_layers == 2
        return report(experiment, directory, quick=quick, prompt=prompt, target=target)

    fake_mode(mode)
    args = ("--experiment=quickstart", "--mode=fake", f"--workdir={tmp_path}")
    assert run(*args, "--override=model.num_layers=2", "--prompt=x", "--target=cpu:8") == 0
    read = Report.read(tmp_path)
    assert read.results["given"] == "{'quick': False, 'prompt': 'x', 'target': 'cpu:8'}"
    assert workdir.load(tmp_path / "config.json").model.num_layers == 2


def test_the_workdir_remembers_its_experiment(fake_mode, tmp_path):
    def mode(experiment, directory):
        assert (experiment.name, experiment.seed) == ("quickstart", 7)
        return report(experiment, directory)

    fake_mode(mode)
    where = ("--mode=fake", f"--workdir={tmp_path}")
    assert run(*where, "--experiment=quickstart", "--override=seed=7") == 0
    assert run(*where) == 0


def test_our_fault_is_code_1_with_the_traceback_in_a_file(fake_mode, capsys, tmp_path):
    def mode(experiment, directory):
        return int(None)

    fake_mode(mode)
    args = ("--experiment=quickstart", "--mode=fake", f"--workdir={tmp_path}")
    assert run(*args) == 1
    assert "internal error: TypeError: int() argument" in only_line(capsys.readouterr())
    assert "in mode\n    return int(None)" in (tmp_path / "error.txt").read_text()


def test_the_wrong_mesh_is_said_in_one_line(capsys, tmp_path):
    args = ("--experiment=quickstart", "--override=parallel.mesh.data=3", "--target=cpu:8")
    assert run(*args, "--mode=train", f"--workdir={tmp_path}") == 2
    assert "make the product 8" in only_line(capsys.readouterr())


def test_a_reader_may_leave_early():
    command_line = f"{sys.executable} -m paxlike.main --list | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command_line], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("0", "")
