"""Options of Google Cloud Storage. `StoreConfig` holds the settings that all providers share."""

import dataclasses
import re
from types import NoneType
from typing import ClassVar, Literal

from torchobj.config.checks import check, check_auto_or_bool, check_kinds
from torchobj.config.credentials import GCSCredentialProvider
from torchobj.config.explicit_fields import configuration
from torchobj.config.provider_options import ProviderOptions

_PROJECT = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_DOMAIN = re.compile(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+")
_KMS_KEY = re.compile(r"projects/[^/\s]+/locations/[^/\s]+/keyRings/[^/\s]+/cryptoKeys/[^/\s]+")


def _matches(pattern: re.Pattern[str], value: str | None) -> bool:
    return value is None or pattern.fullmatch(value) is not None


@configuration
class GCSOptions(ProviderOptions):
    """Options of Google Cloud Storage: `StoreConfig(gcs=GCSOptions(...))`. They apply to `gs://` URLs only, also if
    these are written as `gcs://`.

    Args:
        endpoint_url: URL of the store. None: `STORAGE_EMULATOR_HOST`, an emulator, to which requests are sent without a
            token; or `https://storage.<universe_domain>`.
        user_project: Project that is billed for requests and traffic, which requester-pays buckets require. It is sent
            with every request. None: the quota project of the credentials, if they have one; otherwise that of the
            bucket.
        universe_domain: Domain of a cloud other than Google's public one. None: `googleapis.com`.
        anonymous: Whether requests are sent without a token, for public buckets and emulators.
        credential_provider: A callable that returns credentials, in place of Application Default Credentials: a dict of
            `token`, an OAuth 2.0 access token, and `expires_at`, a datetime with a time zone, or None. The form is that
            of obstore: objects of `obstore.auth.google` work, and a coroutine is awaited, in an event loop of its own.

            It is called on a separate thread, at the first request and before each expiry, in every process that sends
            requests. Requests wait for it only without valid credentials. If it raises, takes more than 20 s, or
            returns invalid or expired credentials, requests that need them raise a `CredentialsError` with the type and
            message of the exception, and the next request calls it again. Its return value does not appear in pickles,
            logs, messages or reprs. For DataLoader workers that are started with spawn, the callable itself is pickled.
            Equal callables share credentials and connections; an unhashable callable equals only itself.

            None: Application Default Credentials: the file that `GOOGLE_APPLICATION_CREDENTIALS` names, the credentials
            of `gcloud auth application-default login`, or the service account of the machine.
        storage_class: Storage class of uploaded objects, such as `NEARLINE`; copies are not affected. None: the default
            class of the bucket.
        kms_key_name: Cloud KMS key that encrypts written objects:
            `projects/P/locations/L/keyRings/R/cryptoKeys/K`. None: the default of the bucket.
        parallel_upload: How large objects are written. `auto`: in parts, if the storage class of the object is STANDARD
            (others bill deleted parts for their minimum storage duration), the bucket has no retention policy or
            default hold, and the credentials have the permissions to read its settings and to delete objects; otherwise
            by one resumable upload, which sends parts one after the other. True: always in parts. False: always by a
            resumable upload. Parts are sent in parallel as objects whose names begin with `.torchobj-parts/`, composed,
            and deleted when the upload ends. A bucket with soft delete bills them for its retention duration.
        force_sdk: Whether GET requests and uploads of whole objects or parts go through the crate google-cloud-storage,
            for comparison; slower. It connects by itself: TLS and connection settings, and a path in `endpoint_url`, do
            not apply.

    Raises:
        ConfigError: A value is not allowed; the message names the field and the allowed values.

    Example:
        >>> GCSOptions(endpoint_url="http://localhost:4443", anonymous=True).parallel_upload
        'auto'
        >>> GCSOptions(parallel_upload="never")
        Traceback (most recent call last):
        torchobj.exceptions.ConfigError: parallel_upload='never': must be auto, True or False
    """

    endpoint_url: str | None = None
    user_project: str | None = None
    universe_domain: str | None = None
    anonymous: bool = False
    credential_provider: GCSCredentialProvider | None = dataclasses.field(default=None, repr=False, hash=False)
    storage_class: str | None = None
    kms_key_name: str | None = None
    parallel_upload: bool | Literal["auto"] = "auto"
    force_sdk: bool = False

    _credential_hint: ClassVar[str] = "use Application Default Credentials, or pass a credential_provider"
    _excludes_provider: ClassVar[tuple[str, ...]] = ("anonymous",)

    def __post_init__(self) -> None:
        texts = ("endpoint_url", "user_project", "universe_domain", "storage_class", "kms_key_name")
        check_kinds(self, "a string, or None", (str, NoneType), *texts)
        check_kinds(self, "True or False", (bool,), "anonymous", "force_sdk")
        self._check_endpoint()
        self._check_credential_provider()
        project, domain, key = self.user_project, self.universe_domain, self.kms_key_name
        check("user_project", project, "the ID or number of a project", ok=_matches(_PROJECT, project))
        check("universe_domain", domain, "a domain such as googleapis.com", ok=_matches(_DOMAIN, domain))
        form = "projects/P/locations/L/keyRings/R/cryptoKeys/K, or None"
        check("kms_key_name", key, form, ok=_matches(_KMS_KEY, key))
        check_auto_or_bool(self, "parallel_upload")
        check(
            "user_project",
            project,
            "None if anonymous is True, because an anonymous request cannot be billed",
            ok=project is None or not self.anonymous,
        )
