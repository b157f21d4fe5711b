//! Caffe's `Datum`, the protobuf message in which it keeps a sample.
//!
//! Decoded by hand: eight fields do not need a generator. Unknown fields are skipped, as protobuf asks.

/// A sample as it was written.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Datum<'a> {
    /// Field 1.
    pub(super) channels: u64,
    /// Field 2.
    pub(super) height: u64,
    /// Field 3.
    pub(super) width: u64,
    /// Field 4: planes, one byte per pixel, or an image file if it is encoded.
    pub(super) data: &'a [u8],
    /// Field 5.
    pub(super) label: i64,
    /// Field 6: planes, if not in `data`.
    pub(super) float_data: Vec<f32>,
    /// Field 7.
    pub(super) encoded: bool,
}

impl<'a> Datum<'a> {
    /// Decodes a message, or says what it has instead of one.
    pub(super) fn decode(bytes: &'a [u8]) -> Result<Self, String> {
        let mut datum = Self::default();
        let mut rest = Rest(bytes);
        while !rest.0.is_empty() {
            let tag = rest.varint()?;
            let value = rest.value(tag & 7)?;
            match (tag >> 3, value) {
                (1, Value::Number(channels)) => datum.channels = channels,
                (2, Value::Number(height)) => datum.height = height,
                (3, Value::Number(width)) => datum.width = width,
                (4, Value::Bytes(data)) => datum.data = data,
                // An int32 is sign-extended to 64 bits.
                (5, Value::Number(label)) => datum.label = label as i64,
                (6, Value::Four(float)) => datum.float_data.push(f32::from_le_bytes(float)),
                // Packed: Caffe does not write it so, but protobuf readers have to take it.
                (6, Value::Bytes(packed)) => {
                    let (floats, odd) = packed.as_chunks();
                    if !odd.is_empty() {
                        return Err(format!("float_data of {} bytes", packed.len()));
                    }
                    datum.float_data.extend(floats.iter().copied().map(f32::from_le_bytes));
                }
                (7, Value::Number(encoded)) => datum.encoded = encoded != 0,
                (field @ 1..=7, _) => return Err(format!("field {field} of another type")),
                _ => {}
            }
        }
        Ok(datum)
    }
}

enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Four([u8; 4]),
    Eight,
}

struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, len: u64) -> Result<&'a [u8], String> {
        let split = usize::try_from(len).ok().and_then(|len| self.0.split_at_checked(len));
        let (taken, rest) =
            split.ok_or_else(|| format!("{} bytes where {len} are announced", self.0.len()))?;
        self.0 = rest;
        Ok(taken)
    }

    fn varint(&mut self) -> Result<u64, String> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err("a number of more than ten bytes".to_owned())
    }

    fn value(&mut self, wire_type: u64) -> Result<Value<'a>, String> {
        Ok(match wire_type {
            0 => Value::Number(self.varint()?),
            1 => {
                self.take(8)?;
                Value::Eight
            }
            2 => {
                let len = self.varint()?;
                Value::Bytes(self.take(len)?)
            }
            5 => {
                let four = self.take(4)?;
                Value::Four([0, 1, 2, 3].map(|i| four[i]))
            }
            other => return Err(format!("wire type {other}")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    // channels 1, height 1, width 2, data [9, 8], label -1, two floats, encoded, unknown field 15.
    const MESSAGE: &[u8] = &[
        0x08, 1, 0x10, 1, 0x18, 2, 0x22, 2, 9, 8, 0x28, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
        0xff, 0xff, 1, 0x35, 0, 0, 0x80, 0x3f, 0x35, 0, 0, 0, 0x40, 0x38, 1, 0x79, 1, 2, 3, 4, 5,
        6, 7, 8,
    ];

    #[test]
    fn reads_every_field_and_skips_unknown_ones() {
        let expected = Datum {
            channels: 1,
            height: 1,
            width: 2,
            data: &[9, 8],
            label: -1,
            float_data: vec![1.0, 2.0],
            encoded: true,
        };
        assert_eq!(Datum::decode(MESSAGE), Ok(expected));
    }

    #[test]
    fn packed_floats_are_the_same_floats() {
        let packed = [0x32, 8, 0, 0, 0x80, 0x3f, 0, 0, 0, 0x40];
        assert_eq!(Datum::decode(&packed).unwrap().float_data, [1.0, 2.0]);
        assert_eq!(Datum::decode(&packed[..1 + 1]), Err("0 bytes where 8 are announced".into()));
        assert_eq!(Datum::decode(&[0x32, 3, 0, 0, 0]), Err("float_data of 3 bytes".into()));
    }

    #[test]
    fn says_what_is_wrong() {
        assert_eq!(Datum::decode(&[0x22, 5, 1, 2]), Err("2 bytes where 5 are announced".into()));
        assert_eq!(Datum::decode(&[0x0b]), Err("wire type 3".into()));
        assert_eq!(Datum::decode(&[0x0a, 0]), Err("field 1 of another type".into()));
        assert_eq!(Datum::decode(&[0xff; 11]), Err("a number of more than ten bytes".into()));
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Datum::decode(&bytes);
        }
    }
}
