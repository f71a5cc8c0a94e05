//! What every store must do, as functions over a [`Client`]. A store is right when all of them pass on it; what it
//! declares that it cannot do, it must refuse by a typed error.
#![expect(clippy::unwrap_used, reason = "a failed check is a panic that says where")]

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

use crate::client::Client;
use crate::error::{ErrorKind, Result};
use crate::read::Read;
use crate::types::{ByteRange, PutOptions, Version};

/// A client on an empty bucket of its own.
pub type Subject = Arc<Client>;

type Check = fn(Subject) -> Pin<Box<dyn Future<Output = ()> + Send>>;

macro_rules! suite {
    ($($room:ident :: $name:ident),* $(,)?) => {
        /// The functions of the suite by their names.
        pub const SUITE: &[(&str, Check)] = &[$((stringify!($name), |subject| Box::pin($room::$name(subject)))),*];
    };
}

suite! {
    keys::every_key_is_itself_or_refused,
    keys::keys_that_differ_hold_different_objects,
    reads::what_was_put_is_read,
    reads::an_empty_object_is_read,
    reads::ranges_are_the_bytes_they_name,
    reads::a_missing_object_is_not_found,
    reads::a_version_that_is_gone_is_changed,
    reads::a_large_object_is_read_in_parts,
    reads::many_objects_come_in_their_order,
    reads::one_missing_object_does_not_spoil_the_others,
    reads::a_buffer_that_is_too_small_is_refused,
    reads::a_file_like_reader_reads_what_is_there,
    reads::segments_of_one_body_land_each_in_its_memory,
    reads::both_ends_come_with_size_and_version,
    writes::a_put_replaces,
    writes::attributes_are_kept,
    writes::a_put_if_absent_never_replaces,
    writes::a_put_if_matches_replaces_only_that,
    writes::of_two_conditional_writers_one_wins,
    writes::a_copy_is_the_same_object,
    writes::deleted_objects_are_gone,
    uploads::a_large_put_is_whole,
    uploads::a_writer_makes_what_was_written,
    uploads::what_is_gathered_is_whole_with_its_checksums,
    uploads::what_was_gathered_and_not_closed_leaves_nothing,
    uploads::a_writer_of_nothing_makes_an_empty_object,
    uploads::an_aborted_writer_leaves_nothing,
    uploads::a_dropped_writer_leaves_nothing,
    uploads::an_upload_replaces_only_at_its_commit,
    uploads::a_commit_if_absent_never_replaces,
    uploads::a_wrong_part_is_refused_at_the_commit,
    uploads::an_upload_that_ended_takes_no_parts,
    lists::all_keys_are_listed_once_and_in_order,
    lists::a_prefix_and_a_delimiter_select,
    lists::a_listing_begins_after_a_key,
    lists::an_empty_prefix_is_an_empty_listing,
    lists::a_manifest_holds_what_was_listed,
}

/// `length` bytes that differ from place to place, and by `seed`.
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
    Ok(subject.get(Read::whole(key)).await?.buffer.as_slice().to_vec())
}

async fn get_range(subject: &Subject, key: &str, range: Range<u64>) -> Result<Vec<u8>> {
    let read = Read { range: Some(ByteRange::Bounded(range)), ..Read::whole(key) };
    Ok(subject.get(read).await?.buffer.as_slice().to_vec())
}

fn kind_of<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    match result {
        Ok(value) => panic!("expected an error, got {value:?}"),
        Err(error) => error.kind(),
    }
}
