"""The base class of the options of S3 and GCS: checks and pickles their endpoint and credential provider."""

from typing import TYPE_CHECKING, Any, ClassVar, Self

from torchobj.config.checks import check
from torchobj.config.credentials import CredentialSource, check_picklable, source_of
from torchobj.config.explicit_fields import ExplicitFields
from torchobj.exceptions import ConfigError


class ProviderOptions(ExplicitFields):
    """Base class of a dataclass with the fields `endpoint_url` and `credential_provider`."""

    #: Where credentials belong that are not allowed in a URL.
    _credential_hint: ClassVar[str]
    #: Fields that exclude a `credential_provider`.
    _excludes_provider: ClassVar[tuple[str, ...]]

    if TYPE_CHECKING:

        @property
        def endpoint_url(self) -> str | None:
            """A field of each dataclass."""

        @property
        def credential_provider(self) -> Any:
            """A field of each dataclass."""

    @property
    def _credential_source(self) -> CredentialSource | None:
        """Calls `credential_provider`; read by the core."""
        return None if self.credential_provider is None else source_of(self.credential_provider)

    def __getstate__(self) -> dict[str, Any]:
        if self.credential_provider is not None:
            check_picklable(self.credential_provider)
        return self.__dict__

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self

    def _check_endpoint(self) -> None:
        url = self.endpoint_url or ""
        # The part before an @ may be a password, which must not be logged.
        if "@" in url:
            raise ConfigError(f"endpoint_url: must have no user and password; {self._credential_hint}")
        if any(mark in url for mark in "?#"):
            raise ConfigError("endpoint_url: must have no query or fragment")
        check(
            "endpoint_url",
            self.endpoint_url,
            "a URL that begins with http:// or https://",
            ok=self.endpoint_url is None or url.startswith(("http://", "https://")),
        )

    def _check_credential_provider(self) -> None:
        # Only the type is shown: its repr may contain credentials.
        provider = self.credential_provider
        is_callable = provider is None or callable(provider)
        check("credential_provider", type(provider), "a callable, or None", ok=is_callable)
        for name in self._excludes_provider if provider is not None else ():
            if getattr(self, name):
                raise ConfigError(f"credential_provider: must be None if {name} is set")
