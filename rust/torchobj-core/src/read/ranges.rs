//! Reads several ranges of one object with one request, each into memory of its own. The caller chooses the ranges:
//! `coalesce` has the rule.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use futures_util::future::try_join_all;

use super::response::Expected;
use super::scatter_list::{FragmentSink, ScatterList};
use super::{ReadRequest, ReadResult};
use crate::buffer::ReceivedBytes;
use crate::client::Client;
use crate::engine::Allocate;
use crate::error::{ErrorKind, Operation, Result};
use crate::types::{ByteRange, GetRequest};

impl Client {
    /// Reads `ranges` of the object of `read`, whose range is ignored, with one request from the first range to the
    /// last; bytes between them are discarded. Ranges that are on the local disk are read there, and divide the others
    /// into several requests. The ranges are ascending, not empty and do not overlap. Each allocator is called once the
    /// response has arrived. The results have the order of `ranges`.
    ///
    /// # Errors
    /// Those of [`get_into`](Self::get_into), and `Range` if a range ends beyond the object.
    pub(crate) async fn get_ranges<A: Allocate>(
        self: &Arc<Self>,
        read: ReadRequest,
        ranges: Vec<(Range<u64>, A)>,
    ) -> Result<Vec<(ReadResult, A::Handle)>> {
        let ReadRequest { key, size, version, .. } = read;
        self.store().check_key(Operation::Get, &key)?;
        let expected = Expected { size, version };
        let mut groups: Vec<Vec<(Range<u64>, A)>> = Vec::with_capacity(1);
        let mut joins = false;
        for (range, allocator) in ranges {
            let request = expected.request(&key, Some(ByteRange::Bounded(range.clone())));
            // It is opened again when it is read: one descriptor at a time.
            let is_local = self.store().open_local(&request).await.is_some();
            match groups.last_mut() {
                Some(group) if joins && !is_local => group.push((range, allocator)),
                _ => groups.push(vec![(range, allocator)]),
            }
            joins = !is_local;
        }
        let read = |ranges| self.get_group(&key, expected.clone(), ranges);
        Ok(try_join_all(groups.into_iter().map(read)).await?.into_iter().flatten().collect())
    }

    /// Reads ranges with one request, or one that is on the local disk.
    async fn get_group<A: Allocate>(
        self: &Arc<Self>,
        key: &str,
        expected: Expected,
        ranges: Vec<(Range<u64>, A)>,
    ) -> Result<Vec<(ReadResult, A::Handle)>> {
        let parts: Vec<_> = ranges.iter().map(|(range, _)| range.clone()).collect();
        let (Some(start), Some(end)) = (parts.first(), parts.last()) else { return Ok(Vec::new()) };
        let span = start.start..end.end;
        let request = expected.request(key, Some(ByteRange::Bounded(span.clone())));
        let first = self.open_first(GetRequest { parts: &parts, ..request }, span.end - span.start).await?;
        let size = first.result.size();
        if size < span.end {
            let message = format!("requested bytes {span:?}, the object has {size}");
            return Err(self.store().error(ErrorKind::Range, Operation::Get, key, &message));
        }
        let expected = expected.after(&*first.result);
        let mut at = span.start;
        let (mut fragments, mut reads) = (VecDeque::with_capacity(ranges.len()), Vec::with_capacity(ranges.len()));
        for (index, (range, allocator)) in ranges.into_iter().enumerate() {
            let (pending, dest, length, handle) = self.pending(key, &range, allocator)?;
            let gap_bytes = usize::try_from(range.start - at).expect("gaps have at most 1 MiB");
            at = range.end;
            fragments.push_back(FragmentSink { gap_bytes, index, dest });
            reads.push((pending, length, handle));
        }
        let mut sink = ScatterList::new(fragments, false, self.store().url(key).into(), ReceivedBytes::default());
        self.receive(key, span.clone(), &expected, &mut sink, Some(first)).await?;
        drop(sink);
        let finish = |(pending, length, handle): (crate::buffer::PendingBuffer, usize, A::Handle)| {
            let buffer = pending.finish(length).map_err(|_| self.bug(&span))?;
            Ok((ReadResult { buffer, size, version: expected.version.clone() }, handle))
        };
        reads.into_iter().map(finish).collect()
    }
}
