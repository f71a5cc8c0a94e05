//! Commits without a response, with paused time and the store in memory.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout};

use super::Writer;
use crate::client::Client;
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::faulty_store::{Fault, FaultyStore};
use crate::memory::MemoryStore;
use crate::policy::Policy;
use crate::runtime::runtime;
use crate::types::{Condition, PutOptions, Version};

const UNKNOWN: &str = "it is not known whether the object was written";

fn policy() -> Policy {
    Policy { part_bytes: 1 << 10, whole_below_bytes: 1 << 10, hedge: false, ..Policy::default() }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn client(policy: Policy) -> (Arc<FaultyStore>, Arc<Client>) {
    let store = Arc::new(FaultyStore::new(Arc::new(MemoryStore::new("commits"))));
    (store.clone(), Arc::new(Client::new(store, policy)))
}

async fn put_if(client: &Arc<Client>, condition: Condition) -> Result<Version> {
    let options = PutOptions { condition, ..PutOptions::default() };
    client.put("k", Bytes::from_static(&[7; 4 << 10]).into(), &options).await
}

async fn put(client: &Arc<Client>) -> Result<Version> {
    put_if(client, Condition::Always).await
}

fn assert_unknown(error: &Error) {
    assert!(error.to_string().contains(UNKNOWN), "{error}");
}

#[tokio::test(start_paused = true)]
async fn the_object_of_a_commit_without_a_response_is_found_with_a_single_permit() {
    let policy = Policy { max_in_flight: 1, max_in_flight_cap: None, commit_timeout: seconds(10), ..policy() };
    let (store, client) = client(policy);
    store.script(Operation::Commit, [Fault::CommitWithoutResponse(seconds(1))]);
    let version = put(&client).await.unwrap();
    assert_eq!(client.head("k").await.unwrap().version, Some(version));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_sends_nothing_while_it_assembles_has_until_the_commit_timeout() {
    for condition in [Condition::Always, Condition::Absent] {
        let (store, client) = client(policy());
        store
            .script(Operation::Commit, [Fault::CommitWithoutResponse(seconds(60)), Fault::Fail(ErrorKind::UploadGone)]);
        let version = put_if(&client, condition).await.unwrap();
        assert_eq!((client.head("k").await.unwrap().version, store.pending()), (Some(version), 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_commit_is_checked_again_when_the_check_fails() {
    let (store, client) = client(policy());
    store.script(Operation::Commit, [Fault::LoseResponse]);
    store
        .script(Operation::Head, [ErrorKind::Server, ErrorKind::Reset, ErrorKind::ExpiredCredentials].map(Fault::Fail));
    put(&client).await.unwrap();
    assert_eq!(store.pending(), 0);
}

#[tokio::test(start_paused = true)]
async fn attempts_of_a_commit_continue_after_the_retry_timeout() {
    let (store, client) = client(policy());
    store.script(Operation::Commit, [Fault::Delay(seconds(3600)); 8]);
    let started = Instant::now();
    put(&client).await.unwrap();
    assert!(started.elapsed() > client.policy().retry_timeout, "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_upload_whose_commit_may_still_run_is_not_aborted() {
    let (store, client) = client(policy());
    store.script(Operation::Commit, [Fault::CommitWithoutResponse(seconds(5000)), Fault::Fail(ErrorKind::UploadGone)]);
    let started = Instant::now();
    let error = put(&client).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UploadGone, "{error}");
    assert_unknown(&error);
    let policy = client.policy();
    let took = started.elapsed();
    assert!(took > policy.commit_timeout - seconds(60), "{took:?}");
    assert!(took <= policy.commit_timeout + policy.first_byte_timeout, "{took:?}");
    assert_eq!(client.uploads("").await.unwrap().len(), 1);
    sleep(seconds(5000)).await;
    client.head("k").await.expect("the store has finished the commit");
}

#[tokio::test(start_paused = true)]
async fn a_commit_that_every_attempt_refused_is_checked_once_and_aborted() {
    for (first, kind) in [
        (None, ErrorKind::InvalidRequest),
        (None, ErrorKind::UploadGone),
        (Some(ErrorKind::Reset), ErrorKind::Precondition),
        (Some(ErrorKind::Connect), ErrorKind::AccessDenied),
    ] {
        let (store, client) = client(policy());
        store.script(Operation::Commit, first.into_iter().chain([kind]).map(Fault::Fail));
        let started = Instant::now();
        let error = put(&client).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(!error.to_string().contains(UNKNOWN), "{error}");
        assert!(started.elapsed() < seconds(5), "{:?}", started.elapsed());
        assert!(client.uploads("").await.unwrap().is_empty(), "{kind:?}");
    }
}

#[test]
fn an_upload_that_is_cancelled_is_aborted() {
    let (store, client) = client(policy());
    store.script(Operation::PutPart, [Fault::Delay(seconds(3600)); 4]);
    let begun_and_aborted = async {
        let writing = tokio::spawn({
            let client = client.clone();
            async move { put(&client).await }
        });
        for is_begun in [true, false] {
            while client.uploads("").await.unwrap().is_empty() == is_begun {
                sleep(Duration::from_millis(1)).await;
            }
            writing.abort();
        }
    };
    let ended = runtime().block_on(async { timeout(seconds(60), begun_and_aborted).await });
    ended.expect("the parts are deleted");
}

#[tokio::test(start_paused = true)]
async fn a_check_that_is_refused_returns_the_error_of_the_commit_with_a_hint() {
    let (store, client) = client(policy());
    store.script(Operation::Commit, [ErrorKind::Reset, ErrorKind::UploadGone].map(Fault::Fail));
    store.script(Operation::Head, [Fault::Fail(ErrorKind::AccessDenied)]);
    let started = Instant::now();
    let error = put(&client).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UploadGone, "{error}");
    assert_unknown(&error);
    assert!(started.elapsed() < seconds(5), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn attempts_and_checks_without_a_response_end_in_a_timeout() {
    let (store, client) = client(Policy { max_attempts: 3, ..policy() });
    store.script(Operation::Commit, [Fault::Delay(seconds(7200)); 3]);
    store.script(Operation::Head, [Fault::Delay(seconds(7200)); 1000]);
    let started = Instant::now();
    let error = put(&client).await.unwrap_err();
    assert_eq!((error.kind(), error.attempts()), (ErrorKind::Timeout, 3), "{error}");
    assert!(error.to_string().contains("sent nothing for 30 s"), "{error}");
    assert_unknown(&error);
    assert!(started.elapsed() <= seconds(930), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn no_commit_is_sent_after_the_commit_timeout() {
    for held in [seconds(10), seconds(20), seconds(3600)] {
        let policy = Policy { max_in_flight: 1, max_in_flight_cap: None, commit_timeout: seconds(10), ..policy() };
        let (_, client) = client(policy);
        let mut writer = Writer::new(client.clone(), "k", PutOptions::default()).unwrap();
        writer.fill(&[7; 1 << 10]).unwrap();
        writer.send_part().await.unwrap();
        sleep(seconds(1)).await;
        let permit = client.permit().await;
        let holder = tokio::spawn(async move {
            sleep(held).await;
            drop(permit);
        });
        let started = Instant::now();
        let error = timeout(seconds(3000), writer.close()).await.expect("commit_timeout ends it").unwrap_err();
        assert!(error.to_string().contains("no result within commit_timeout_s=10"), "{error}");
        assert!(!error.to_string().contains(UNKNOWN), "{error}");
        assert!(started.elapsed() <= seconds(10) + seconds(60), "{:?}", started.elapsed());
        holder.await.unwrap();
        assert_eq!(client.head("k").await.unwrap_err().kind(), ErrorKind::NotFound, "{held:?}");
    }
}

/// Each of these writes is retried: without the tokens that their success returns, the quota is used up after about fifty.
#[tokio::test(start_paused = true)]
async fn retries_of_requests_that_succeed_never_empty_the_quota() {
    let (store, client) = client(Policy { max_in_flight: 1, max_in_flight_cap: None, ..policy() });
    for _ in 0..300 {
        store.script(Operation::Commit, [Fault::Fail(ErrorKind::Server); 2]);
        put(&client).await.unwrap();
    }
    for _ in 0..300 {
        let upload = client.store().begin_upload("aborted", &PutOptions::default()).await.unwrap();
        store.script(Operation::Abort, [Fault::Fail(ErrorKind::Server); 2]);
        client.abort(&upload).await.unwrap();
    }
    for _ in 0..300 {
        client.delete(&["small".to_owned()]).await.unwrap();
        store.script(Operation::Put, [Fault::Fail(ErrorKind::Server), Fault::LoseResponse]);
        let options = PutOptions { condition: Condition::Absent, ..PutOptions::default() };
        client.put("small", Bytes::from_static(&[7; 10]).into(), &options).await.unwrap();
    }
    assert_eq!(store.pending(), 0);
}
