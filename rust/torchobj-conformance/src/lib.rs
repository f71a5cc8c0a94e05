//! The conformance suite of stores: functions that take a [`Client`]. A store conforms if all of them pass. Calls beyond its
//! capabilities must fail with the kind of error that the suite expects.
#![expect(clippy::unwrap_used, reason = "a failed check panics with its location")]

mod keys;
mod lists;
mod reads;
mod uploads;
mod writes;

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;

use torchobj_core::client::Client;
use torchobj_core::error::{ErrorKind, Result};
use torchobj_core::read::ReadRequest;
use torchobj_core::types::{ByteRange, PutOptions, Version};

/// A client of an empty bucket that no other test uses.
pub type Subject = Arc<Client>;

type Check = fn(Subject) -> Pin<Box<dyn Future<Output = ()> + Send>>;

macro_rules! suite {
    ($($module:ident :: $name:ident),* $(,)?) => {
        /// The functions of the suite and their names.
        pub const SUITE: &[(&str, Check)] = &[$((stringify!($name), |subject| Box::pin($module::$name(subject)))),*];
    };
}

suite! {
    keys::every_key_is_stored_unchanged_or_refused,
    keys::different_keys_are_different_objects,
    reads::a_written_object_is_read,
    reads::an_empty_object_is_read,
    reads::ranges_have_the_requested_bytes,
    reads::a_missing_object_is_not_found,
    reads::a_read_of_a_replaced_version_fails_as_changed,
    reads::a_large_object_is_read_in_parts,
    reads::many_objects_are_returned_in_order,
    reads::one_missing_object_does_not_fail_the_others,
    reads::a_buffer_that_is_too_small_is_refused,
    reads::a_file_like_reader_reads_the_bytes_of_the_object,
    reads::ranges_of_one_body_are_read_each_into_its_memory,
    reads::head_and_tail_have_size_and_version,
    writes::a_put_replaces,
    writes::attributes_are_stored,
    writes::a_get_has_the_attributes_and_the_checksum_of_the_object,
    writes::a_put_if_absent_never_replaces,
    writes::a_put_if_matches_replaces_only_this_version,
    writes::one_of_two_conditional_writers_succeeds,
    writes::a_copy_has_the_same_bytes_and_attributes,
    writes::deleted_objects_are_not_found,
    uploads::a_large_put_is_complete,
    uploads::a_writer_makes_an_object_of_the_written_bytes,
    uploads::a_gathered_object_is_complete_with_its_checksums,
    uploads::an_aborted_gather_leaves_nothing,
    uploads::a_writer_without_bytes_makes_an_empty_object,
    uploads::an_aborted_writer_leaves_nothing,
    uploads::a_dropped_writer_leaves_nothing,
    uploads::an_upload_replaces_only_at_its_commit,
    uploads::a_commit_if_absent_never_replaces,
    uploads::a_wrong_part_is_refused_at_the_commit,
    uploads::an_aborted_upload_accepts_no_parts,
    lists::all_keys_are_listed_once_and_in_order,
    lists::a_prefix_and_a_delimiter_select,
    lists::a_listing_begins_after_a_key,
    lists::a_prefix_without_objects_has_an_empty_listing,
    lists::a_manifest_has_the_listed_objects,
}

/// `length` pseudo-random bytes.
pub fn pattern(length: usize, seed: u64) -> Bytes {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; length];
    rng.fill(&mut bytes);
    bytes.into()
}

async fn put(subject: &Subject, key: &str, body: impl Into<Bytes>) -> Version {
    let options = PutOptions::default();
    subject.put(key, body.into().into(), &options).await.unwrap_or_else(|error| panic!("put {key:?}: {error}"))
}

async fn get(subject: &Subject, key: &str) -> Result<Vec<u8>> {
    Ok(subject.get(ReadRequest::whole(key)).await?.buffer.as_slice().to_vec())
}

async fn get_range(subject: &Subject, key: &str, range: Range<u64>) -> Result<Vec<u8>> {
    let read = ReadRequest { range: Some(ByteRange::Bounded(range)), ..ReadRequest::whole(key) };
    Ok(subject.get(read).await?.buffer.as_slice().to_vec())
}

fn kind_of<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    match result {
        Ok(value) => panic!("expected an error, got {value:?}"),
        Err(error) => error.kind(),
    }
}
