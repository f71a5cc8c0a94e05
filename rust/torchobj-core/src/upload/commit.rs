//! Commits one upload in parts. A commit without a response may have made the object or may still be running, so the object
//! is checked before an error is returned. Aborts nothing.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use crate::error::{Error, ErrorKind, Operation, Result, Retry};
use crate::policy::{Attempts, ConcurrencyLimit, Permit, Policy, backoff, with_idle_timeout, within};
use crate::store::ObjectStore;
use crate::types::{Condition, PartReceipt, Upload, Version};

/// Doubles with each check, up to 20 s: a commit of 900 s is checked about a hundred times.
const CHECK_BACKOFF: Duration = Duration::from_millis(500);

/// A commit: the object, its parts and its limits.
#[derive(Debug)]
pub struct Commit<'a> {
    /// The store of the upload.
    pub store: &'a dyn ObjectStore,
    /// Idle timeouts (`first_byte_timeout`, `idle_timeout`) and the total timeout (`commit_timeout`).
    pub policy: &'a Policy,
    /// Each request takes one of these permits; `None` if the caller holds a permit.
    pub permits: Option<&'a Arc<ConcurrencyLimit>>,
    /// The upload.
    pub upload: &'a Upload,
    /// All of its parts, in order.
    pub parts: &'a [PartReceipt],
    /// The condition on the object that is replaced.
    pub condition: &'a Condition,
}

/// A commit that failed, or whose outcome is unknown.
#[derive(Debug)]
pub struct CommitFailure {
    /// The error of the last attempt.
    pub error: Error,
    /// Whether the store may still be processing an attempt. Aborting the upload could then destroy the object.
    pub may_be_running: bool,
}

impl From<Error> for CommitFailure {
    fn from(error: Error) -> Self {
        Self { error, may_be_running: false }
    }
}

impl Commit<'_> {
    /// Makes the parts the object. Takes at most `commit_timeout`, plus one `first_byte_timeout` for a last check.
    ///
    /// # Errors
    /// Errors that persist after the retries, if the object does not exist.
    pub async fn run(&self, attempts: Attempts<'_>) -> Result<Version, CommitFailure> {
        let deadline = Instant::now() + self.policy.commit_timeout;
        let mut attempts = attempts.ending_after(self.policy.commit_timeout);
        let (mut outcome_unknown, mut may_be_running) = (false, false);
        let error = loop {
            let mut sent = false;
            let error = match self.attempt(deadline, &mut sent).await {
                Ok(version) => {
                    attempts.succeeded();
                    return Ok(version);
                }
                Err(error) => error,
            };
            outcome_unknown |= sent && error.kind().outcome_unknown();
            may_be_running |= sent && is_unanswered(&error);
            if error.kind() == ErrorKind::Integrity {
                // The parts are stored: another attempt would make the same object.
                break error;
            }
            if let Err(error) = attempts.failed(error).await {
                break error;
            }
        };
        if !outcome_unknown {
            return Err(error.into());
        }
        // The condition fails for any earlier attempt as well, unless that attempt made the object.
        may_be_running &= error.kind() != ErrorKind::Precondition;
        let version = self.settle(error, may_be_running.then_some(deadline)).await?;
        attempts.succeeded();
        Ok(version)
    }

    /// Makes one attempt. Its permit is released at its end; a check afterwards takes another one.
    async fn attempt(&self, deadline: Instant, sent: &mut bool) -> Result<Version> {
        // A store may send white space for minutes while it assembles the parts, so the timeout is an idle timeout.
        let silence = self.policy.first_byte_timeout.max(self.policy.idle_timeout);
        let attempt = async {
            let _permit = self.permit().await;
            // `timeout_at` polls once after the deadline as well, which would send the request.
            if Instant::now() >= deadline {
                return None;
            }
            *sent = true;
            Some(with_idle_timeout(silence, self.store.commit(self.upload, self.parts, self.condition)).await)
        };
        match timeout_at(deadline, attempt).await {
            Ok(Some(Some(result))) => result,
            Ok(Some(None)) => {
                let message = format!("the store sent nothing for {} s", silence.as_secs_f64());
                log::warn!("commit {}: {message}", self.store.url(&self.upload.key));
                Err(self.timeout(&message))
            }
            Ok(None) | Err(_) => Err(self.timeout(&format!("no result within {}", self.limit()))),
        }
    }

    async fn permit(&self) -> Option<Permit> {
        match self.permits {
            Some(permits) => Some(permits.acquire().await),
            None => None,
        }
    }

    fn timeout(&self, message: &str) -> Error {
        self.store.error(ErrorKind::Timeout, Operation::Commit, &self.upload.key, message)
    }

    fn limit(&self) -> String {
        format!("commit_timeout_s={}", self.policy.commit_timeout.as_secs_f64())
    }

    /// Checks whether the commit that failed with `error` made the object. If the commit may still be running, checks until
    /// `running_until`.
    async fn settle(&self, error: Error, running_until: Option<Instant>) -> Result<Version, CommitFailure> {
        let may_be_running = running_until.is_some();
        let until = Instant::now() + self.policy.first_byte_timeout;
        let until = running_until.map_or(until, |deadline| deadline.max(until));
        if may_be_running {
            let wait_s = (until - Instant::now()).as_secs();
            let url = self.store.url(&self.upload.key);
            log::warn!("commit {url}: checking for up to {wait_s} s whether the object is written, because {error}");
        }
        let hint = "it is not known whether the object was written: check before you retry";
        match timeout_at(until, self.check(may_be_running)).await {
            Ok(Ok(Some(version))) => Ok(version),
            Ok(Ok(None)) => Err(error.into()),
            Ok(Err(_)) | Err(_) if may_be_running => {
                let error = error.with_hint(format!("{hint}, and raise {} if the store needs more", self.limit()));
                Err(CommitFailure { error, may_be_running })
            }
            Ok(Err(_)) | Err(_) => Err(error.with_hint(hint).into()),
        }
    }

    /// Checks until the store responds, or until the object exists if the commit `may_be_running`. Returns errors that a
    /// retry would repeat.
    async fn check(&self, may_be_running: bool) -> Result<Option<Version>> {
        let limit = self.policy.first_byte_timeout;
        let mut number = 0;
        loop {
            number += 1;
            let check = async {
                let _permit = self.permit().await;
                self.store.committed(self.upload, self.parts).await
            };
            match within(limit, check).await {
                Some(Ok(None)) if may_be_running => {}
                Some(Ok(found)) => return Ok(found),
                Some(Err(error)) if error.retry() == Retry::Never => return Err(error),
                Some(Err(_)) | None => {}
            }
            sleep(backoff(CHECK_BACKOFF, number, &mut fastrand::Rng::new())).await;
        }
    }
}

/// Returns whether an attempt ended without a response of the store, which may still be processing it. A proxy reports this
/// as 502 or 504.
fn is_unanswered(error: &Error) -> bool {
    !error.is_permanent() && error.kind().outcome_unknown() && matches!(error.status(), None | Some(502 | 504))
}
