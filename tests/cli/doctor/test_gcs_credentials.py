"""Where `torchobj doctor` finds the credentials of Google Cloud Storage."""

import torchobj
from torchobj.cli.doctor.gcs_credentials import gcs_source


def test_the_source_of_credentials_of_gcs_is_named(tmp_path):
    key = tmp_path / "key.json"
    key.write_text('{"type": "service_account", "private_key": "topsecret"}')
    options, named = torchobj.GCSOptions(), {"GOOGLE_APPLICATION_CREDENTIALS": str(key)}
    assert gcs_source(options, named).found == f"GOOGLE_APPLICATION_CREDENTIALS={key}: service_account"
    assert gcs_source(options, {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "none")}).state == "failed"
    assert "emulator" in gcs_source(options, {"STORAGE_EMULATOR_HOST": "localhost:1"}).found
    assert "service account of the machine" in gcs_source(options, {"CLOUDSDK_CONFIG": str(tmp_path)}).found
