//! Waves of a plan, read from a store in memory.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::*;
use crate::faulty_store::{Fault, FaultyStore};
use crate::memory::MemoryStore;
use crate::policy::Policy;
use crate::types::PutOptions;

const BEFORE: &[u8] = b"what precedes an array";

/// A store with an object of framed arrays, each with 100 bytes behind its descriptor.
struct Bench {
    client: Arc<Client>,
    faulty: Arc<FaultyStore>,
    object: Vec<u8>,
    arrays: Vec<(u64, Vec<u8>)>,
}

impl Bench {
    async fn of(sizes: &[usize]) -> Self {
        let faulty = Arc::new(FaultyStore::new(Arc::new(MemoryStore::new(format!("p-{}", fastrand::u64(..))))));
        let client = Arc::new(Client::new(faulty.clone(), Policy::default()));
        let mut random = fastrand::Rng::with_seed(3);
        let mut bench = Self { client, faulty, object: Vec::new(), arrays: Vec::new() };
        for size in sizes {
            let array: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(*size).collect();
            let sum = Crc32::of(&array).value().to_le_bytes();
            let item = [BEFORE, &array, DESCRIPTOR_MARK, &sum, &[7; 100]].concat();
            bench.arrays.push((bench.object.len() as u64, array));
            bench.object.extend(item);
        }
        bench.put().await;
        bench
    }

    async fn put(&self) {
        self.client.put("dir/k", bytes::Bytes::from(self.object.clone()).into(), &PutOptions::default()).await.unwrap();
    }

    fn plan(&self, wave_bytes: u64, tile_bytes: u64) -> SlicePlan {
        SlicePlan::new(self.client.clone(), "dir/".to_owned(), true, wave_bytes, tile_bytes)
    }

    fn add_array(&self, plan: &mut SlicePlan, number: usize) -> usize {
        let (offset, array) = &self.arrays[number];
        let frame = plan.described(BEFORE);
        plan.add_array("k", *offset, frame, array.len() as u64)
    }

    fn add_slice(&self, plan: &mut SlicePlan, number: usize, slice: &Slice, memory: Option<Memory>) -> usize {
        let frame = plan.described(BEFORE);
        plan.add_slice("k", self.arrays[number].0, frame, slice, memory)
    }
}

fn slice(shape: &[u64], offsets: &[u64], lengths: &[u64]) -> Slice {
    Slice::new(shape.to_vec(), offsets.to_vec(), lengths.to_vec(), 1).unwrap()
}

fn memory(bytes: usize) -> (Memory, Receiver<Vec<u8>>) {
    let (back, receiver) = channel();
    (Memory::sent_back(bytes, back), receiver)
}

/// Copies a tile from the rows in `bytes` to `slice`, which has two dimensions, as the caller does.
fn copy_tile(bytes: &[u8], tile: &Tile, slice: &mut [u8], width: u64) {
    for row in 0..tile.lengths[0] {
        for column in 0..tile.lengths[1] {
            let from = (tile.inner[0] + row) * tile.shape[1] + tile.inner[1] + column;
            let to = (tile.outer[0] + row) * width + tile.outer[1] + column;
            slice[usize::try_from(to).unwrap()] = bytes[usize::try_from(from).unwrap()];
        }
    }
}

#[tokio::test]
async fn consecutive_equal_frames_share_their_bytes() {
    let bench = Bench::of(&[]).await;
    let mut plan = bench.plan(3000, 1);
    let frames = [b"one", b"one", b"two"].map(|before| match plan.described(before) {
        Frame::Described(bytes) => bytes,
        Frame::None(_) => unreachable!("a described frame"),
    });
    assert_eq!(frames[0].as_ptr(), frames[1].as_ptr());
    assert_eq!(frames.map(|frame| frame.to_vec()), [b"one", b"one", b"two"]);
}

#[tokio::test]
async fn whole_arrays_are_buffered_in_waves_of_bounded_size() {
    let bench = Bench::of(&[1000; 20]).await;
    let mut plan = bench.plan(3000, 1);
    (0..20).for_each(|number| assert_eq!(bench.add_array(&mut plan, number), number));
    let (mut found, mut ended, mut waves) = (Vec::new(), Vec::new(), 0);
    while let Some(wave) = plan.read().await.unwrap() {
        assert!(wave.buffer.len() <= 3000 + 1000 + 200, "{}", wave.buffer.len());
        found.extend(wave.buffered.iter().map(|read| {
            assert_eq!(read.start as u64 % ALIGNMENT, 0);
            wave.buffer.as_slice()[read.start..read.start + 1000].to_vec()
        }));
        ended.extend(wave.ended);
        waves += 1;
    }
    assert_eq!(found, bench.arrays.iter().map(|(_, array)| array.clone()).collect::<Vec<_>>());
    assert_eq!(ended, (0..20).map(|number| (number, Outcome::Complete)).collect::<Vec<_>>());
    assert_eq!(waves, 7);
}

#[tokio::test]
async fn tiles_of_several_waves_are_the_slice() {
    let bench = Bench::of(&[200 * 300]).await;
    for (offsets, lengths) in [([0, 0], [200, 300]), ([17, 40], [101, 77]), ([3, 0], [100, 300])] {
        let mut plan = bench.plan(10_000, 5000);
        bench.add_slice(&mut plan, 0, &slice(&[200, 300], &offsets, &lengths), None);
        let (mut found, mut ended) = (vec![0; usize::try_from(lengths[0] * lengths[1]).unwrap()], Vec::new());
        while let Some(wave) = plan.read().await.unwrap() {
            assert!(wave.buffer.len() <= 15_200);
            for read in wave.buffered {
                let tile = read.tile.unwrap();
                copy_tile(&wave.buffer.as_slice()[read.start..], &tile, &mut found, lengths[1]);
            }
            ended.extend(wave.ended);
        }
        let rows = bench.arrays[0].1.chunks(300).skip(offsets[0] as usize).take(lengths[0] as usize);
        let columns = offsets[1] as usize..(offsets[1] + lengths[1]) as usize;
        assert!(rows.flat_map(|row| &row[columns.clone()]).eq(&found), "{offsets:?}");
        assert_eq!(ended, [(0, Outcome::Complete)]);
    }
}

#[tokio::test]
async fn long_runs_go_to_memory_and_memory_of_another_read_is_not_used() {
    let bench = Bench::of(&[10 * 8192, 100]).await;
    let mut plan = bench.plan(1 << 20, 1 << 20);
    let ((whole, whole_back), (part, part_back)) = (memory(10 * 8192), memory(3 * 4096));
    let start = whole.addresses().start;
    bench.add_slice(&mut plan, 0, &slice(&[10, 8192], &[0, 0], &[10, 8192]), Some(whole));
    bench.add_slice(&mut plan, 0, &slice(&[10, 8192], &[2, 100], &[3, 4096]), Some(part));
    assert_eq!(plan.reserved.get(&start), Some(&(start + 10 * 8192)));
    let (other, _back) = memory(100);
    let shared = other.addresses().start;
    plan.reserved.insert(shared - 1, shared + 1);
    bench.add_slice(&mut plan, 1, &slice(&[100], &[0], &[100]), Some(other));
    let wave = plan.read().await.unwrap().unwrap();
    assert_eq!(wave.ended, [(0, Outcome::Complete), (1, Outcome::Complete), (2, Outcome::Complete)]);
    assert_eq!(wave.buffered.iter().map(|read| read.read).collect::<Vec<_>>(), [2]);
    let array = &bench.arrays[0].1;
    assert!(whole_back.try_recv().unwrap() == *array);
    assert!(array.chunks(8192).skip(2).take(3).flat_map(|row| &row[100..4196]).eq(&part_back.try_recv().unwrap()));
    assert!(plan.read().await.unwrap().is_none());
}

#[tokio::test]
async fn one_wave_is_one_request_for_adjacent_arrays() {
    let bench = Bench::of(&[5000; 30]).await;
    let mut plan = bench.plan(1 << 20, 1 << 20);
    for number in 0..30 {
        let (memory, _) = memory(5000);
        match number % 2 {
            0 => bench.add_array(&mut plan, number),
            _ => bench.add_slice(&mut plan, number, &slice(&[5000], &[0], &[5000]), Some(memory)),
        };
    }
    bench.faulty.script(Operation::Get, [Fault::Delay(Duration::ZERO); 10]);
    let before = bench.faulty.pending();
    plan.read().await.unwrap();
    assert_eq!(before - bench.faulty.pending(), 1);
}

#[tokio::test]
async fn another_frame_is_reported_and_its_bytes_are_not() {
    for position in [3, BEFORE.len() + 5000] {
        let mut bench = Bench::of(&[5000, 5000]).await;
        bench.object[position] ^= 1;
        bench.put().await;
        let mut plan = bench.plan(1 << 20, 1000);
        bench.add_array(&mut plan, 0);
        bench.add_slice(&mut plan, 0, &slice(&[5000], &[0], &[5000]), None);
        bench.add_slice(&mut plan, 0, &slice(&[5000], &[0], &[5000]), Some(memory(5000).0));
        bench.add_array(&mut plan, 1);
        let wave = plan.read().await.unwrap().unwrap();
        let other = Outcome::OtherFrame;
        assert_eq!(wave.ended, [(0, other), (1, other), (2, other), (3, Outcome::Complete)], "{position}");
        assert_eq!(wave.buffered.iter().map(|read| read.read).collect::<Vec<_>>(), [3]);
    }
}

#[tokio::test]
async fn another_byte_of_an_array_that_is_read_whole_is_damage() {
    let mut bench = Bench::of(&[9000]).await;
    bench.object[BEFORE.len() + 4321] ^= 1;
    bench.put().await;
    let whole = slice(&[9000], &[0], &[9000]);
    let known = Crc32::of(&bench.arrays[0].1).value();
    for (verify, outcome) in [(true, Outcome::Damaged), (false, Outcome::Complete)] {
        // All in one wave, and in many.
        for limit in [1 << 20, 1000] {
            let mut plan = bench.plan(limit, limit);
            plan.verify = verify;
            bench.add_array(&mut plan, 0);
            bench.add_slice(&mut plan, 0, &whole, None);
            bench.add_slice(&mut plan, 0, &whole, Some(memory(9000).0));
            plan.add_slice("k", BEFORE.len() as u64, Frame::None(known), &whole, None);
            plan.add_slice("k", BEFORE.len() as u64, Frame::None(0), &whole, None);
            bench.add_slice(&mut plan, 0, &slice(&[9000], &[0], &[8999]), None);
            let mut ended = Vec::new();
            while let Some(wave) = plan.read().await.unwrap() {
                ended.extend(wave.ended.into_iter().map(|(_, outcome)| outcome));
            }
            let complete = Outcome::Complete;
            assert_eq!(ended, [outcome, outcome, outcome, outcome, complete, complete], "{verify} {limit}");
        }
    }
}

#[tokio::test]
async fn an_array_beyond_the_end_is_an_error_before_memory_is_allocated() {
    let bench = Bench::of(&[1000]).await;
    for bytes in [1_u64 << 20, (1 << 20) + 1, 1 << 40, (1 << 63) - 5000] {
        let mut plan = bench.plan(1 << 20, 1 << 20);
        plan.add_array("k", 10, Frame::None(0), bytes);
        let error = plan.read().await.err().expect("the object ends before the array");
        assert_eq!(error.kind(), ErrorKind::Range, "{bytes}");
        assert!(error.to_string().contains("has 1130"), "{error}");
    }
}

#[tokio::test]
async fn an_object_replaced_between_two_waves_is_an_error() {
    let bench = Bench::of(&[1000; 4]).await;
    let mut plan = bench.plan(1000, 1000);
    (0..4).for_each(|number| assert_eq!(bench.add_array(&mut plan, number), number));
    assert!(plan.read().await.unwrap().is_some());
    bench.put().await;
    assert_eq!(plan.read().await.err().expect("another version").kind(), ErrorKind::Changed);
}
