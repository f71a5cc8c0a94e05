//! Divides a slice of a row-major array into runs of adjacent bytes and into tiles. Does no I/O.

use std::ops::Range;

/// A slice of a row-major array. No dimension of the slice is empty.
#[derive(Clone, Debug)]
pub struct Slice {
    shape: Vec<u64>,
    offsets: Vec<u64>,
    lengths: Vec<u64>,
    width: u64,
}

/// A part of a slice that is read at once: a range of whole rows of the array, and the elements that are used of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tile {
    /// Shape of the rows.
    pub shape: Vec<u64>,
    /// Offsets of the tile in the rows.
    pub inner: Vec<u64>,
    /// Offsets of the tile in the slice.
    pub outer: Vec<u64>,
    /// Shape of the tile.
    pub lengths: Vec<u64>,
}

/// Runs of `bytes` bytes each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Runs {
    pub(super) bytes: u64,
    /// Where each run starts, in bytes of the array, in the order of the slice's elements.
    pub(super) starts: Vec<u64>,
}

impl Slice {
    /// The slice `offsets..offsets + lengths` of an array of `shape`, with elements of `width` bytes. `None` if it is
    /// not a slice of the array, is empty, or if the array has 2^63 bytes or more.
    pub fn new(shape: Vec<u64>, offsets: Vec<u64>, lengths: Vec<u64>, width: u64) -> Option<Self> {
        let bytes = shape.iter().try_fold(width, |bytes, length| bytes.checked_mul(*length))?;
        let fits = shape.len() == offsets.len()
            && shape.len() == lengths.len()
            && shape.iter().zip(&offsets).zip(&lengths).all(|((shape, offset), length)| {
                *length > 0 && offset.checked_add(*length).is_some_and(|end| end <= *shape)
            });
        (fits && bytes > 0 && bytes < 1 << 63).then_some(Self { shape, offsets, lengths, width })
    }

    /// Returns whether the slice is the whole array.
    pub(super) fn is_whole(&self) -> bool {
        self.lengths == self.shape
    }

    /// Size of the slice in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.lengths.iter().product::<u64>() * self.width
    }

    /// Size of the array in bytes.
    pub(super) fn array_bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.width
    }

    /// Length of a run in bytes, and number of the dimensions before it.
    fn run(&self) -> (u64, usize) {
        let whole = self.shape.iter().zip(&self.lengths).rev().take_while(|(shape, length)| shape == length).count();
        let outer = self.shape.len() - whole;
        let row = self.shape[outer..].iter().product::<u64>() * self.width;
        match outer.checked_sub(1) {
            Some(last) => (self.lengths[last] * row, last),
            None => (row, 0),
        }
    }

    /// Its runs, unless there are several of less than `min_bytes`.
    pub(super) fn runs(&self, min_bytes: u64) -> Option<Runs> {
        let (bytes, outer) = self.run();
        if bytes < min_bytes && self.lengths[..outer].iter().any(|length| *length > 1) {
            return None;
        }
        let mut stride = self.width;
        let mut starts = vec![0];
        for dimension in (0..self.shape.len()).rev() {
            let (first, count) = (self.offsets[dimension], if dimension < outer { self.lengths[dimension] } else { 1 });
            let moves = (first..first + count).map(|index| index * stride);
            starts = moves.flat_map(|start| starts.iter().map(move |inner| start + inner)).collect();
            stride *= self.shape[dimension];
        }
        Some(Runs { bytes, starts })
    }

    /// The tiles of the slice, each with its bytes in the array. The rows of a tile have at most `max_bytes`, unless one
    /// element has more.
    pub(super) fn tiles(&self, max_bytes: u64) -> Vec<(Range<u64>, Tile)> {
        let mut tiles = Vec::new();
        self.add_tiles(max_bytes, 0, &mut Vec::new(), &mut tiles);
        tiles
    }

    /// Adds the tiles of the row at index `outer` of the dimensions before; the row starts at byte `start`.
    fn add_tiles(&self, max_bytes: u64, start: u64, outer: &mut Vec<u64>, tiles: &mut Vec<(Range<u64>, Tile)>) {
        let depth = outer.len();
        let around = |one: u64, own: &[u64]| [&vec![one; depth][..], own].concat();
        let Some((first, count)) = self.offsets.get(depth).copied().zip(self.lengths.get(depth).copied()) else {
            let [zeros, ones] = [0, 1].map(|one| vec![one; depth]);
            let tile = Tile { shape: ones.clone(), inner: zeros, outer: outer.clone(), lengths: ones };
            return tiles.push((start..start + self.width, tile));
        };
        let row = self.shape[depth + 1..].iter().product::<u64>() * self.width;
        if row > max_bytes && depth + 1 < self.shape.len() {
            for index in 0..count {
                outer.push(index);
                self.add_tiles(max_bytes, start + (first + index) * row, outer, tiles);
                outer.pop();
            }
            return;
        }
        let step = (max_bytes / row).max(1);
        for index in (0..count).step_by(usize::try_from(step).unwrap_or(usize::MAX)) {
            let rows = step.min(count - index);
            let behind = depth + 1..;
            let begin = start + (first + index) * row;
            let tile = Tile {
                shape: around(1, &[&[rows], &self.shape[behind.clone()]].concat()),
                inner: around(0, &[&[0], &self.offsets[behind.clone()]].concat()),
                outer: [outer, &[index][..], &vec![0; self.shape.len() - depth - 1]].concat(),
                lengths: around(1, &[&[rows], &self.lengths[behind]].concat()),
            };
            tiles.push((begin..begin + rows * row, tile));
        }
    }

    /// The part of a tile's rows that is used, as a slice of these rows.
    pub(super) fn of_tile(&self, tile: &Tile) -> Self {
        let Tile { shape, inner, lengths, .. } = tile.clone();
        Self { shape, offsets: inner, lengths, width: self.width }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Arrays of up to four dimensions, and a slice of each.
    fn slices() -> impl Strategy<Value = Slice> {
        let dimension = (1..6_u64)
            .prop_flat_map(|size| (Just(size), 0..size))
            .prop_flat_map(|(size, offset)| (Just(size), (Just(offset), 1..=size - offset)));
        (proptest::collection::vec(dimension, 0..5), 1..4_u64).prop_map(|(dimensions, width)| {
            let (shape, (offsets, lengths)) = dimensions.into_iter().unzip();
            Slice::new(shape, offsets, lengths, width).expect("each dimension fits")
        })
    }

    /// The bytes of a slice in the array, in the order of its elements.
    fn bytes_of(slice: &Slice) -> Vec<u64> {
        let mut starts = vec![0];
        for dimension in 0..slice.shape.len() {
            let range = slice.offsets[dimension]..slice.offsets[dimension] + slice.lengths[dimension];
            let size = slice.shape[dimension];
            starts = starts.into_iter().flat_map(|at| range.clone().map(move |index| at * size + index)).collect();
        }
        starts.into_iter().flat_map(|at| at * slice.width..(at + 1) * slice.width).collect()
    }

    /// Indices of the elements of a box of `lengths` at `offsets`, in an array of `shape`.
    fn elements(shape: &[u64], offsets: &[u64], lengths: &[u64]) -> Vec<u64> {
        bytes_of(&Slice::new(shape.to_vec(), offsets.to_vec(), lengths.to_vec(), 1).expect("a box of the array"))
    }

    proptest! {
        #[test]
        fn runs_are_the_bytes_of_a_slice_in_order(slice in slices()) {
            let Runs { bytes, starts } = slice.runs(0).unwrap();
            let found: Vec<_> = starts.iter().flat_map(|start| *start..start + bytes).collect();
            prop_assert_eq!(found, bytes_of(&slice));
        }

        #[test]
        fn several_runs_are_long_or_absent(slice in slices(), min_bytes in 0..40_u64) {
            let all = slice.runs(0).unwrap();
            let is_long = all.starts.len() == 1 || all.bytes >= min_bytes;
            prop_assert_eq!(slice.runs(min_bytes), is_long.then_some(all));
        }

        #[test]
        fn tiles_cover_each_element_of_a_slice_once_and_are_small(slice in slices(), max_bytes in 1..200_u64) {
            let mut found = vec![None; usize::try_from(slice.bytes() / slice.width).unwrap()];
            for (range, tile) in slice.tiles(max_bytes) {
                prop_assert!(range.end - range.start <= max_bytes.max(slice.width));
                prop_assert_eq!(tile.shape.iter().product::<u64>() * slice.width, range.end - range.start);
                let read = elements(&tile.shape, &tile.inner, &tile.lengths);
                let placed = elements(&slice.lengths, &tile.outer, &tile.lengths);
                for (read, placed) in read.into_iter().zip(placed) {
                    let before = found[usize::try_from(placed).unwrap()].replace(range.start / slice.width + read);
                    prop_assert_eq!(before, None);
                }
            }
            let expected: Vec<_> = bytes_of(&Slice { width: 1, ..slice.clone() }).into_iter().map(Some).collect();
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn what_is_not_a_slice_of_an_array_is_refused() {
        let slice = |shape: &[u64], offsets: &[u64], lengths: &[u64]| {
            Slice::new(shape.to_vec(), offsets.to_vec(), lengths.to_vec(), 4)
        };
        assert!(slice(&[4, 3], &[1, 0], &[3, 3]).is_some());
        assert!(slice(&[4, 3], &[2, 0], &[3, 3]).is_none(), "beyond the end");
        assert!(slice(&[4, 3], &[0, 0], &[0, 3]).is_none(), "empty");
        assert!(slice(&[4, 3], &[0], &[4]).is_none(), "another rank");
        assert!(slice(&[1 << 31, 1 << 31], &[0, 0], &[1, 1]).is_none(), "2^64 bytes");
        assert!(slice(&[4], &[u64::MAX], &[1]).is_none(), "the end exceeds 2^64");
    }
}
