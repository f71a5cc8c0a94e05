"""The checks of `torchobj doctor` on the machine and the configuration file."""

import pytest

from torchobj.config import config_file


def test_doctor_without_a_url_checks_the_machine(cli):
    names = {"versions", "open files", "locked memory", "/dev/shm", "memfd", "memory budget"}
    assert names <= cli.checks().keys()


@pytest.mark.parametrize("value", ['["topsecret"]', '{ name = "topsecret" }'])
def test_a_value_of_the_wrong_type_in_the_configuration_file_is_not_shown(cli, tmp_path, value):
    (tmp_path / "torchobj.toml").write_text(f'["s3://"]\ns3 = {{ profile = {value} }}\n')
    config_file._read.clear()
    done = cli.run("doctor")
    assert done.exit_code == 1 and "profile=<class" in done.stdout and "topsecret" not in done.output
