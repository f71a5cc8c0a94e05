//! Calls the `credential_provider` of a configuration. The call runs on a Python thread without Rust frames, so that it can
//! outlive the interpreter.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use pyo3::prelude::*;
use torchobj_store::credentials::{CredentialProvider, CredentialSender, CredentialSource, ProvidedCredentials};

/// A `torchobj.config.credentials.CredentialSource`.
#[derive(FromPyObject)]
struct PythonSource {
    number: u64,
    start: Py<PyAny>,
}

impl CredentialSource for PythonSource {
    fn id(&self) -> u64 {
        self.number
    }

    fn start(&self, sender: CredentialSender) {
        let pending = CredentialAnswer(Mutex::new(Some(sender)));
        // While the interpreter shuts down, nothing is called: dropping the sender reports that.
        Python::try_attach(|py| {
            let pending = Bound::new(py, pending)?;
            if let Err(error) = self.start.call1(py, (&pending,)) {
                pending.get().send(Err(format!("credential_provider cannot be called: {error}")));
            }
            PyResult::Ok(())
        });
    }
}

/// Receives the result of one call of a `credential_provider`. Only the first result is used.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct CredentialAnswer(Mutex<Option<CredentialSender>>);

impl CredentialAnswer {
    fn send(&self, outcome: Result<ProvidedCredentials, String>) {
        if let Some(sender) = self.0.lock().expect("no holder of this lock panics").take() {
            // The receiver is dropped after the time limit.
            let _ = sender.send(outcome);
        }
    }
}

#[pymethods]
impl CredentialAnswer {
    /// Sends the credentials that the callable returned. `expires_at` is in seconds since 1970; None: never.
    fn credentials(
        &self,
        access_key_id: Option<String>,
        secret_access_key: Option<String>,
        token: Option<String>,
        expires_at: Option<f64>,
    ) {
        // Times before 1970 have expired too.
        let time = |seconds: f64| SystemTime::UNIX_EPOCH + Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let expires_at = expires_at.map(time);
        self.send(Ok(ProvidedCredentials { access_key_id, secret_access_key, token, expires_at }));
    }

    /// Sends the message of an exception that the callable raised.
    fn error(&self, message: String) {
        self.send(Err(message));
    }
}

/// The provider of an `S3Options` or a `GCSOptions`.
pub(crate) fn provider(options: &Bound<'_, PyAny>) -> PyResult<Option<CredentialProvider>> {
    let source: Option<PythonSource> = options.getattr("_credential_source")?.extract()?;
    Ok(source.map(|source| CredentialProvider::new(Arc::new(source))))
}
