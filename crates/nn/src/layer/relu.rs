//! max(x, 0), in place.

use pulp::{Arch, NullaryFnOnce};

/// NaN stays NaN: a diverging net must not look healthy.
pub(crate) fn forward(x: &mut [f32]) {
    Arch::new().dispatch(Forward(x));
}

/// `y` is the output of [`forward`], `gradient` that of its output and then that of its input.
pub(crate) fn backward(y: &[f32], gradient: &mut [f32]) {
    Arch::new().dispatch(Backward { y, gradient });
}

struct Forward<'a>(&'a mut [f32]);

impl NullaryFnOnce for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for x in self.0 {
            *x = if *x < 0.0 { 0.0 } else { *x };
        }
    }
}

struct Backward<'a> {
    y: &'a [f32],
    gradient: &'a mut [f32],
}

impl NullaryFnOnce for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (gradient, y) in self.gradient.iter_mut().zip(self.y) {
            *gradient = if *y > 0.0 { *gradient } else { 0.0 };
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn negative_values_stop_values_and_gradients() {
        let mut x = [-1.0, 0.0, 2.0, -0.5];
        super::forward(&mut x);
        assert_eq!(x, [0.0, 0.0, 2.0, 0.0]);
        let mut gradient = [1.0, 2.0, 3.0, 4.0];
        super::backward(&x, &mut gradient);
        assert_eq!(gradient, [0.0, 0.0, 3.0, 0.0]);
    }

    #[test]
    fn nan_is_not_hidden() {
        let mut x = [f32::NAN; 40];
        super::forward(&mut x);
        assert!(x.iter().all(|x| x.is_nan()));
    }
}
