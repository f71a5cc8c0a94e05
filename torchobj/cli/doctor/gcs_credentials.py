"""Where the credentials of Google Cloud Storage come from, as requests find them: in the environment and files only,
without the metadata service of a machine. No values are shown.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from torchobj.cli.doctor.check import UNSIGNED, Check
from torchobj.config import GCSOptions

_NAME = "credentials"


def gcs_source(options: GCSOptions, environ: Mapping[str, str] = os.environ) -> Check:
    """Where the credentials of Google Cloud Storage come from: Application Default Credentials, in their order."""
    if options.credential_provider is not None:
        return Check(_NAME, "ok", "from a credential_provider")
    emulator = options.endpoint_url is None and environ.get("STORAGE_EMULATOR_HOST")
    if options.anonymous or emulator:
        why = "STORAGE_EMULATOR_HOST names an emulator" if emulator else "requests have no token"
        return Check(_NAME, "note", f"{UNSIGNED}: {why}")
    named = environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    folder = Path(environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud").expanduser()
    path = Path(named) if named else folder / "application_default_credentials.json"
    try:
        kind = json.loads(path.read_bytes()).get("type", "unknown type")
    except OSError as error:
        if named:
            advice = "correct GOOGLE_APPLICATION_CREDENTIALS, or unset it"
            return Check(_NAME, "failed", f"GOOGLE_APPLICATION_CREDENTIALS={path}: {error.strerror}", advice)
    except (ValueError, AttributeError):
        return Check(_NAME, "failed", f"{path}: is not a JSON file of credentials")
    else:
        return Check(_NAME, "ok", f"{'GOOGLE_APPLICATION_CREDENTIALS=' if named else ''}{path}: {kind}")
    advice = "`gcloud auth application-default login`, or --no-sign-request, unless this is a machine of Google Cloud"
    where = f" at GCE_METADATA_HOST={environ['GCE_METADATA_HOST']}" if environ.get("GCE_METADATA_HOST") else ""
    return Check(_NAME, "note", f"none in files: the service account of the machine, if it has one{where}", advice)
