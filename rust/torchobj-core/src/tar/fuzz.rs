//! Mutates valid shards, by hand: `TORCHOBJ_FUZZ_SECONDS=600 cargo test --release -p torchobj-core --lib tar::fuzz -- --ignored`.
//!
//! A mutated shard gives the same samples and the same error in one piece and in random pieces, whether it is compressed or
//! not; and a walk over its headers finds the same samples. No input panics.

use std::env;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::Compression;
use super::tests::{entry, gzip, pax, samples, sealed, shard, walked, zstd};

/// A valid shard.
fn valid(rng: &mut Rng) -> Vec<u8> {
    let sizes: Vec<usize> = (0..rng.usize(1..12)).map(|_| rng.usize(0..1500)).collect();
    let mut bytes = shard(&sizes);
    if rng.bool() {
        let records: &[(&str, &[u8])] = match rng.u8(0..4) {
            0 => &[("size", b"77")],
            1 => &[("path", b"a/b.c"), ("comment", b"x=y")],
            2 => &[("GNU.sparse.major", b"1")],
            _ => &[("mtime", b"1.5"), ("path", b"\xff/.b")],
        };
        bytes.splice(0..0, [pax(records), entry(b"first.x", b'0', &[1; 77])].concat());
    }
    bytes
}

/// Makes the header at a random block valid again, so that changes of its other fields have an effect.
fn seal(bytes: &mut [u8], rng: &mut Rng) {
    for block in bytes.chunks_exact_mut(512) {
        if rng.u8(0..3) > 0 && block[257..262] == *b"ustar" {
            let repaired = sealed(block.to_vec());
            block.copy_from_slice(&repaired);
        }
    }
}

fn mutate(bytes: &mut Vec<u8>, rng: &mut Rng) {
    for _ in 0..rng.usize(1..5) {
        if bytes.is_empty() {
            return;
        }
        let at = rng.usize(0..bytes.len());
        match rng.u8(0..7) {
            0 => bytes[at] ^= 1 << rng.u8(0..8),
            1 => bytes.truncate(at),
            2 => {
                let end = rng.usize(at..=bytes.len().min(at + 3000));
                let part = bytes[at..end].to_vec();
                let to = rng.usize(0..=bytes.len());
                bytes.splice(to..to, part);
            }
            3 => drop(bytes.drain(at..bytes.len().min(at + rng.usize(0..2000)))),
            // A size, type or checksum of some header.
            4 => {
                let field = at / 512 * 512 + 124;
                let sizes: [&[u8]; 6] = [
                    b"77777777777 ",
                    b"00000000000 ",
                    b"00000001000 ",
                    b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff",
                    b"\xff",
                    b"-1 ",
                ];
                let size = sizes[rng.usize(0..sizes.len())];
                if let Some(field) = bytes.get_mut(field..field + size.len()) {
                    field.copy_from_slice(size);
                }
            }
            5 => {
                if let Some(kind) = bytes.get_mut(at / 512 * 512 + 156) {
                    *kind = b"\x000123457LKSxgXV"[rng.usize(0..15)];
                }
            }
            _ => bytes[at] = rng.u8(..),
        }
    }
    seal(bytes, rng);
}

fn cuts(length: usize, rng: &mut Rng) -> Vec<usize> {
    let mut cuts: Vec<usize> = (0..rng.usize(0..8)).map(|_| rng.usize(0..=length)).collect();
    cuts.sort_unstable();
    cuts
}

/// Checks one input.
fn check(bytes: &[u8], rng: &mut Rng) {
    let whole = samples(bytes, &[], None, 0);
    assert_eq!(samples(bytes, &cuts(bytes.len(), rng), None, 0), whole);
    let (found, result, _) = walked(bytes);
    let good: Vec<_> = whole.0.iter().filter(|sample| sample.3.is_ok()).cloned().collect();
    // A walk ends at an error earlier: at a sample with an error, at a member that exceeds the shard, and at a name that is
    // not UTF-8.
    assert!(found.len() <= whole.0.len() && whole.0.starts_with(&found), "{found:?} of {:?}", whole.0);
    let utf8 = !result.as_ref().is_err_and(|error| error.reason.contains("not UTF-8"));
    if whole.1.is_ok() && good.len() == whole.0.len() && utf8 {
        assert_eq!((found, result), (whole.0.clone(), Ok(())));
    }
    let (compressed, compression) =
        if rng.bool() { (gzip(bytes), Compression::Gzip) } else { (zstd(bytes), Compression::Zstd) };
    assert_eq!(samples(&compressed, &cuts(compressed.len(), rng), Some(compression), 0), whole);
    let mut damaged = compressed;
    for _ in 0..rng.usize(1..4) {
        let at = rng.usize(0..damaged.len());
        damaged[at] = rng.u8(..);
    }
    let whole = samples(&damaged, &[], Some(compression), 0);
    let cut = samples(&damaged, &cuts(damaged.len(), rng), Some(compression), 0);
    // A damaged stream may decompress further in one piece than in another before the error.
    assert_eq!(cut.1.is_ok(), whole.1.is_ok());
    let common = cut.0.len().min(whole.0.len());
    assert_eq!(cut.0[..common], whole.0[..common]);
}

fn fuzz(limit: Duration, seed: u64) -> u64 {
    let end = Instant::now() + limit;
    let mut count = 0;
    while count < 50 || Instant::now() < end {
        // One seed per input: a failure names it.
        let seed = seed.wrapping_add(count);
        let result = std::panic::catch_unwind(|| {
            let mut rng = Rng::with_seed(seed);
            let mut bytes = valid(&mut rng);
            mutate(&mut bytes, &mut rng);
            check(&bytes, &mut rng);
        });
        assert!(result.is_ok(), "the input of TORCHOBJ_FUZZ_SEED={seed} failed");
        count += 1;
    }
    count
}

#[test]
fn a_mutated_shard_gives_the_same_result_in_pieces() {
    assert!(fuzz(Duration::ZERO, 1) >= 50);
}

#[test]
#[ignore = "runs for TORCHOBJ_FUZZ_SECONDS"]
#[expect(clippy::print_stderr, reason = "run by hand")]
fn fuzzing() {
    let number = |name: &str| env::var(name).ok().and_then(|number| number.parse().ok());
    let seed = number("TORCHOBJ_FUZZ_SEED").unwrap_or_else(|| fastrand::u64(..));
    let count = fuzz(Duration::from_secs(number("TORCHOBJ_FUZZ_SECONDS").unwrap_or(60)), seed);
    eprintln!("{count} inputs from seed {seed}");
}
