//! Takes objects that callers and workers demand, by number or by name. `window` keeps the order.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::{KnownSource, Object, Prefetcher, Waiter};
use crate::error::{Error, ErrorKind, Operation, Result};
use crate::fork;
use crate::object_ref::ObjectRef;
use crate::read::ReadResult;

/// An object that a caller demands.
#[derive(Debug)]
pub(super) enum Demand {
    Number(Object),
    /// Serialized by [`ObjectRef::to_bytes`], of a source of names.
    Name {
        source: u64,
        record: Vec<u8>,
    },
}

impl Demand {
    pub(super) fn object(self, sources: &mut HashMap<u64, KnownSource>) -> Object {
        match self {
            Self::Number(object) => object,
            Self::Name { source, record } => {
                let index = match sources.get_mut(&source) {
                    Some(KnownSource::Named(names)) => names.number(&record),
                    // An unknown source: reading this number returns the error.
                    _ => u64::MAX,
                };
                Object { source, index }
            }
        }
    }
}

impl Prefetcher {
    /// Takes objects for a loader, concurrently. The results have the order of `objects`. Dropping the future discards the
    /// results.
    pub async fn take(self: &Arc<Self>, loader: u64, objects: &[Object]) -> Vec<Result<ReadResult>> {
        self.take_each(loader, objects.iter().copied().map(Demand::Number)).await
    }

    /// Takes objects of `source` by name; otherwise like [`take`](Self::take).
    pub async fn take_by_name(
        self: &Arc<Self>,
        loader: u64,
        source: u64,
        names: &[Arc<ObjectRef>],
    ) -> Vec<Result<ReadResult>> {
        self.sweep(source);
        self.take_each(loader, names.iter().map(|name| Demand::Name { source, record: name.to_bytes() })).await
    }

    async fn take_each(
        self: &Arc<Self>,
        loader: u64,
        demands: impl ExactSizeIterator<Item = Demand>,
    ) -> Vec<Result<ReadResult>> {
        let _timer = self.stats.wait_timer(loader);
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..demands.len()).map(|_| oneshot::channel()).unzip();
        self.demand(loader, demands.zip(senders.into_iter().map(Waiter::Local)));
        let mut taken = Vec::with_capacity(receivers.len());
        for receiver in receivers {
            taken.push(receiver.await.unwrap_or_else(|_| Err(lost_read())));
        }
        taken
    }

    /// Takes each object for its waiter, which belongs to `loader`.
    pub(super) fn demand(self: &Arc<Self>, loader: u64, waiters: impl Iterator<Item = (Demand, Waiter)>) {
        let mut deliveries = Vec::new();
        {
            let _inside = fork::enter();
            for (demand, waiter) in waiters {
                // Locked until the number is in use, so that a concurrent sweep cannot remove it.
                let mut sources = self.sources();
                let object = demand.object(&mut sources);
                let charge = self.charge(&sources, object);
                let (found, delivery) = self.window().take(object, loader, charge, waiter);
                self.stats.found(loader, found);
                deliveries.extend(delivery);
            }
        }
        deliveries.into_iter().for_each(|delivery| self.deliver(delivery));
        self.pump();
    }
}

fn lost_read() -> Error {
    Error::new(ErrorKind::Cancelled, Operation::Get, "", "the read ended without a result: a bug")
}
