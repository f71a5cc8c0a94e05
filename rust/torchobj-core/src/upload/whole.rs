//! Writes an object from memory: in one request, or in parts sliced from that memory.

use std::ops::Range;
use std::sync::Arc;

use super::plan::PartSizes;
use super::session::{Session, check_unchanged};
use crate::client::Client;
use crate::error::{ErrorKind, Operation, Result};
use crate::read::ReadRequest;
use crate::types::{Payload, PutOptions, Version};

impl Client {
    /// Writes `payload` as the object `key`, atomically.
    ///
    /// # Errors
    /// `Precondition`, `AccessDenied`, `Unsupported` if the store does not support the condition, and errors that persist
    /// after the retries.
    pub async fn put(self: &Arc<Self>, key: &str, payload: Payload, options: &PutOptions) -> Result<Version> {
        self.store().check_key(Operation::Put, key)?;
        self.check_condition(Operation::Put, key, &options.condition)?;
        if (payload.len() as u64) < self.whole_below_bytes() {
            return self.put_whole(key, &payload, options).await;
        }
        let uploaded = self.put_parts(key, &payload, options).await;
        if self.lost_session(&uploaded) { self.put_parts(key, &payload, options).await } else { uploaded }
    }

    /// Writes an object in one request. If the response to a write is lost, the object is read back and compared.
    ///
    /// # Errors
    /// `Precondition`, `AccessDenied`, and errors that persist after the retries.
    pub(crate) async fn put_whole(
        self: &Arc<Self>,
        key: &str,
        payload: &Payload,
        options: &PutOptions,
    ) -> Result<Version> {
        self.store().check_key(Operation::Put, key)?;
        let mut attempts = self.attempts();
        loop {
            self.wait_for_rate(payload).await;
            let call = self.store().put(key, payload, options);
            let error = match self.attempt_while_active(Operation::Put, key, payload.len(), None, call).await {
                Ok(version) => {
                    attempts.succeeded();
                    return Ok(version);
                }
                Err(error) => error,
            };
            if error.kind() == ErrorKind::Precondition
                && attempts.outcome_unknown()
                && let Some(version) = self.holds(key, payload).await?
            {
                attempts.succeeded();
                return Ok(version);
            }
            if let Err(error) = attempts.failed(check_unchanged(error, payload)?).await {
                // The store may have written the object without a response.
                if attempts.outcome_unknown()
                    && let Ok(Some(version)) = self.holds(key, payload).await
                {
                    attempts.succeeded();
                    return Ok(version);
                }
                return Err(error);
            }
        }
    }

    /// Returns the version of the object `key` if its bytes equal `payload`.
    async fn holds(self: &Arc<Self>, key: &str, payload: &Payload) -> Result<Option<Version>> {
        let fetched = match self.get(ReadRequest::whole(key)).await {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            fetched => fetched?,
        };
        let mut rest = fetched.buffer.as_slice();
        for piece in payload.pieces() {
            match rest.strip_prefix(&**piece) {
                Some(remaining) => rest = remaining,
                None => return Ok(None),
            }
        }
        Ok(fetched.version.filter(|_| rest.is_empty()))
    }

    async fn put_parts(self: &Arc<Self>, key: &str, payload: &Payload, options: &PutOptions) -> Result<Version> {
        let mut session = Session::begin(self.clone(), key, options).await?;
        for range in self.part_sizes().even(payload.len() as u64) {
            session.wait_for_capacity(0, 0).await?;
            session.send(slice(payload, range), 0)?;
        }
        session.commit(&options.condition).await
    }

    /// Smaller objects are written in one request: the configured limit, within that of the store.
    pub(crate) fn whole_below_bytes(&self) -> u64 {
        self.policy().whole_below_bytes.min(self.store().capabilities().max_put_bytes)
    }

    /// The configured part sizes, within the limits of the store.
    pub(crate) fn part_sizes(&self) -> PartSizes {
        PartSizes::new(self.policy().part_bytes, &self.store().capabilities())
    }
}

/// Returns bytes `range` of `payload`, without a copy.
fn slice(payload: &Payload, range: Range<u64>) -> Payload {
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
        fn slices_concatenated_are_the_payload(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 0..8),
            part in 1_u64..25,
        ) {
            let payload = Payload::new(pieces.iter().cloned().map(Bytes::from).collect());
            let size = payload.len() as u64;
            let mut all = Vec::new();
            for range in crate::read::parts(0..size, part) {
                let length = range.end - range.start;
                let slice = slice(&payload, range);
                prop_assert_eq!(slice.len() as u64, length);
                all.extend(slice.pieces().iter().flat_map(|piece| piece.to_vec()));
            }
            prop_assert_eq!(all, pieces.concat());
        }
    }
}
