//! What workers ask, answered: objects as segments, failures as errors in segments.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use super::{Body, Delivered, Object, Prefetcher, Wanted, Wish};
use crate::arena::{Answers, Asked, Handler, Request, Segment};
use crate::buffer::Landing;
use crate::error::{Error, ErrorKind, Operation};
use crate::object_ref::ObjectRef;

impl Handler for Arc<Prefetcher> {
    fn ask(&self, request: Request, answers: Arc<Answers>) {
        let Request { lane, source, objects, ahead, iterator, ended, .. } = request;
        if let Some(iterator) = ended.and_then(|ended| self.announcing().remove(&(lane, ended))) {
            self.cancel(iterator);
        }
        // Until it is announced too, the request is not answered.
        self.answer(source, objects, &answers);
        if !ahead.is_empty() {
            let iterator = *self.announcing().entry((lane, iterator)).or_insert_with(|| self.new_iterator());
            let ahead: Vec<Object> = ahead.into_iter().map(|index| Object { source, index }).collect();
            self.announce(iterator, &ahead);
        }
        drop(answers);
    }

    fn gone(&self, lane: u32) {
        let ended: Vec<u64> = self.announcing().extract_if(|(of, _), _| *of == lane).map(|(_, ended)| ended).collect();
        ended.into_iter().for_each(|iterator| self.cancel(iterator));
    }

    fn room(&self) {
        if !self.announced() {
            self.arena.collect();
        }
        self.rest(Instant::now());
        self.pump();
    }
}

fn garbled() -> Error {
    Error::new(ErrorKind::Config, Operation::Get, "", "a worker asked for an object by no name of one: a bug")
}
/// How long nothing is read before the memory of what was read goes back to the system.
const REST_AFTER: Duration = Duration::from_secs(5);

impl Prefetcher {
    /// Gives back the memory of what is free, if nothing was read for a while.
    pub(super) fn rest(&self, now: Instant) {
        let read = self.stats.objects();
        let mut idle = self.idle.lock().expect("no holder of this lock panics");
        if self.announced() || self.in_flight.load(Ordering::Acquire) > 0 {
            *idle = None;
            return;
        }
        match *idle {
            Some((since, before)) if before == read => {
                if now.duration_since(since) >= REST_AFTER {
                    self.arena.rest();
                }
            }
            _ => *idle = Some((now, read)),
        }
    }

    /// Iterators of workers, by lane and the worker's own name for them. Only the task that serves locks it.
    fn announcing(&self) -> MutexGuard<'_, HashMap<(u32, u32), u64>> {
        self.announcing.lock().expect("no holder of this lock panics")
    }

    /// Takes what a worker asks for.
    fn answer(self: &Arc<Self>, source: u64, objects: Asked, answers: &Arc<Answers>) {
        // Who only announces waits for nothing.
        if objects.is_empty() {
            return;
        }
        let waiting = Arc::new(self.stats.waiting());
        let wish = |position| Wish::Answer { answers: answers.clone(), position, waiting: waiting.clone() };
        match objects {
            Asked::Numbers(numbers) => {
                let wanted = numbers.into_iter().map(|index| Wanted::Number(Object { source, index }));
                self.wish(wanted.enumerate().map(|(position, wanted)| (wanted, wish(position))));
            }
            Asked::Names(names) => {
                self.sweep(source);
                let mut wanted = Vec::with_capacity(names.len());
                for (position, name) in names.into_iter().enumerate() {
                    match name.filter(|record| ObjectRef::from_bytes(record).is_some()) {
                        Some(record) => wanted.push((Wanted::Name { source, record }, wish(position))),
                        None => self.deliver((wish(position), Err(garbled()))),
                    }
                }
                self.wish(wanted.into_iter());
            }
        }
    }

    /// Gives somebody what they waited for.
    pub(super) fn deliver(&self, (wish, result): Delivered) {
        match (wish, result) {
            // Nobody receives it after an interrupt.
            (Wish::Local(sender), Ok(Body { landed, segment })) => {
                drop(segment);
                drop(sender.send(Ok(landed)));
            }
            (Wish::Local(sender), Err(error)) => drop(sender.send(Err(error))),
            (Wish::Answer { answers, position, waiting }, Ok(body)) => {
                drop(body.landed);
                let segment = Arc::into_inner(body.segment).expect("a body has the only view of its segment");
                answers.land(position, segment);
                drop(waiting);
            }
            (Wish::Answer { answers, position, waiting }, Err(error)) => {
                // Where there is no memory for it the answer is a refusal.
                if let Some(segment) = self.write_down(&error) {
                    answers.fail(position, segment);
                }
                drop(waiting);
            }
        }
    }

    fn write_down(&self, error: &Error) -> Option<Segment> {
        let text = error.to_bytes();
        let segment = self.arena.segment(text.len() as u64).ok()?;
        let (landing, mut dest) = Landing::new(segment.memory());
        dest.fill(&text);
        drop(dest);
        drop(landing);
        Arc::into_inner(segment)
    }
}
