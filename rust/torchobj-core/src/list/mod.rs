//! Lists a prefix, and lists one into a manifest (`manifest_listing`). A filter selects the objects.
//!
//! `stream` runs the requests of a listing, page after page or for several ranges of keys concurrently. `ranges` holds the
//! state of the ranges, `split` chooses where to divide them, and `pages` validates the pages of each. `heads` sends HEAD
//! requests for listed objects.

mod filter;
mod fnmatch;
mod heads;
mod manifest_listing;
mod pages;
mod ranges;
mod split;
mod stream;
#[cfg(test)]
mod stream_tests;

pub use self::filter::Filter;
pub use self::heads::{HasMetadata, Scan, head_many, try_head_many};
pub use self::manifest_listing::ManifestListing;
pub use self::pages::Pages;
pub use self::stream::{ListOptions, ListStream};
