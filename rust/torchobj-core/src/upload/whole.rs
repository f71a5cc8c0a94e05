//! Writes an object whose bytes are all there: in one request, or in parts cut from the same memory.

use std::ops::Range;
use std::sync::Arc;

use super::plan::PartSizes;
use super::session::Session;
use crate::client::Client;
use crate::error::{Operation, Result};
use crate::types::{Payload, PutOptions, Version};

impl Client {
    /// Writes `payload` as the object `key`. It becomes visible whole, or not at all.
    ///
    /// # Errors
    /// `Precondition`, `AccessDenied`, `Unsupported` when the store keeps no such condition, and what persists after
    /// the retries.
    pub async fn put(self: &Arc<Self>, key: &str, payload: Payload, options: &PutOptions) -> Result<Version> {
        self.store().check_key(Operation::Put, key)?;
        self.check_condition(Operation::Put, key, &options.condition)?;
        let size = payload.len() as u64;
        if size < self.policy().whole_below_bytes.min(self.store().capabilities().max_put_bytes) {
            return self.put_whole(key, &payload, options).await;
        }
        let mut session = Session::begin(self.clone(), key, options).await?;
        for (number, range) in (1..).zip(self.part_sizes().even(size)) {
            session.room(0, 0).await?;
            session.send(number, range.start, cut(&payload, range), 0)?;
        }
        session.commit(&options.condition).await
    }

    /// Sizes of the parts of an upload: as configured, within the limits of the store.
    pub(super) fn part_sizes(&self) -> PartSizes {
        PartSizes::new(self.policy().part_bytes, &self.store().capabilities())
    }
}

/// The pieces of `payload` that `range` covers, without a copy.
fn cut(payload: &Payload, range: Range<u64>) -> Payload {
    let range = usize::try_from(range.start).expect("in memory")..usize::try_from(range.end).expect("in memory");
    let mut pieces = Vec::new();
    let mut at = 0;
    for piece in payload.pieces() {
        let from = range.start.clamp(at, at + piece.len()) - at;
        let to = range.end.clamp(at, at + piece.len()) - at;
        if from < to {
            pieces.push(piece.slice(from..to));
        }
        at += piece.len();
    }
    Payload::new(pieces)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn cuts_put_together_are_the_payload(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 0..8),
            part in 1_u64..25,
        ) {
            let payload = Payload::new(pieces.iter().cloned().map(Bytes::from).collect());
            let size = payload.len() as u64;
            let mut all = Vec::new();
            for range in crate::read::parts(0..size, part) {
                let length = range.end - range.start;
                let cut = cut(&payload, range);
                prop_assert_eq!(cut.len() as u64, length);
                all.extend(cut.pieces().iter().flat_map(|piece| piece.to_vec()));
            }
            prop_assert_eq!(all, pieces.concat());
        }
    }
}
